"""Attention over a paged cache: decodes and prefills, of sequences whose blocks lie in random order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from benchmarks.gpu import costs
from benchmarks.gpu.cases.case import Case, Peer, Result, Work, normal
from benchmarks.gpu.costs import KVName, ModelShape
from torch import Generator, Tensor

from headway_runtime.kernels.triton.attention_reference import reference_attention
from headway_runtime.kernels.triton.attention_tiles import Coding, HeadShape, shape_class
from headway_runtime.kernels.triton.paged_decode import make_workspace, paged_decode, table_kernel
from headway_runtime.kernels.triton.paged_prefill import paged_prefill
from headway_runtime.kernels.triton.paged_rows import PagedRows, Scoring, used_rows_for
from headway_runtime.layers.kv_cache import KVCache, KVShape
from headway_runtime.layers.kv_numbers import LayerKV, to_codes

BLOCK_SIZE = 16
KEPT: dict[KVName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
CODINGS: dict[KVName, Coding] = {"bfloat16": "none", "fp8": "fp8", "int8": "int8"}
# What is made at once in float32.
BLOCKS_AT_ONCE = 4096
NOT_A_CODE = 0x7F
# Of scores in float32, all heads together: beyond it there is no exact result.
MOST_EXACT_PAIRS = 2**32

# Compiling flex attention for a shape takes many seconds.
LEAST_FLEX_TOKENS = 2**17

Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """query: rows as projections have them, keys and values behind the queries. out: NaN."""

    query: Tensor
    kv: LayerKV
    which: PagedRows
    out: Tensor


def heads_of(model: ModelShape) -> HeadShape:
    return HeadShape(model.num_kv_heads, model.num_groups, model.head_dim, BLOCK_SIZE)


def decode_case(
    name: str,
    model: ModelShape,
    lengths: Lengths,
    kv: KVName = "bfloat16",
    *,
    dtype: torch.dtype = torch.bfloat16,
    scoring: Scoring | None = None,
    skipped: int = 0,
    tolerance: float = 1e-2,
) -> Case:
    """lengths: rows and whole context of each sequence. dtype: of queries, and of a cache without codes.

    skipped: blocks that lie in front of all that are used, and take memory alone.
    """
    heads, own = heads_of(model), scoring or Scoring(model.head_dim**-0.5)

    def make(generator: Generator) -> Work:
        inputs = paged_inputs(heads, lengths, kv, dtype, generator, skipped)
        which = inputs.which
        workspace = make_workspace(heads, which.max_queries, which.num_sequences, generator.device)

        def run() -> Result:
            numbers, scales = inputs.kv.numbers, inputs.kv.scales
            paged_decode(inputs.query, numbers, scales, which, own, heads.num_groups, workspace, inputs.out)
            return inputs.out

        peers = _decode_peers(heads, lengths, generator) if kv == "bfloat16" and scoring is None else {}
        return Work(run, _exact(inputs, own, heads, lengths), peers=peers)

    used_rows = used_rows_for(max(rows for rows, _ in lengths), heads.num_groups)
    return Case(
        name,
        table_kernel(used_rows),
        shape_class(dtype, CODINGS[kv], heads),
        make,
        costs.attention(model, lengths, kv),
        tolerance,
    )


def prefill_case(
    name: str,
    model: ModelShape,
    lengths: Lengths,
    kv: KVName = "bfloat16",
    *,
    dtype: torch.dtype = torch.bfloat16,
    scoring: Scoring | None = None,
    skipped: int = 0,
    tolerance: float = 1e-2,
) -> Case:
    """As `decode_case`."""
    heads, own = heads_of(model), scoring or Scoring(model.head_dim**-0.5)

    def make(generator: Generator) -> Work:
        inputs = paged_inputs(heads, lengths, kv, dtype, generator, skipped)

        def run() -> Result:
            numbers, scales = inputs.kv.numbers, inputs.kv.scales
            paged_prefill(inputs.query, numbers, scales, inputs.which, own, heads.num_groups, inputs.out)
            return inputs.out

        is_alone = len(lengths) == 1 and scoring is None and kv == "bfloat16"
        peers = _prefill_peers(heads, lengths[0], generator) if is_alone else {}
        return Work(run, _exact(inputs, own, heads, lengths), peers=peers)

    return Case(
        name,
        "paged_prefill",
        shape_class(dtype, CODINGS[kv], heads),
        make,
        costs.attention(model, lengths, kv),
        tolerance,
    )


def _exact(
    inputs: PagedInputs, scoring: Scoring, heads: HeadShape, lengths: Lengths
) -> Callable[[], Result] | None:
    num_heads = heads.num_kv_heads * heads.num_groups
    if max(rows * context for rows, context in lengths) * num_heads > MOST_EXACT_PAIRS:
        return None
    kv, which = inputs.kv, inputs.which
    return lambda: reference_attention(inputs.query, kv.numbers, kv.scales, which, scoring, heads.num_groups)


def paged_inputs(
    heads: HeadShape,
    lengths: Lengths,
    kv: KVName,
    dtype: torch.dtype,
    generator: Generator,
    skipped: int = 0,
) -> PagedInputs:
    """All that is nobody's is NaN, but for int8, which has none, and for skipped blocks, which are zeros."""
    device = generator.device
    counts = [-(-context // heads.block_size) for _, context in lengths]
    # The null block, and one that tables name where they say nothing.
    num_blocks = sum(counts) + 2
    cache = layer_kv(heads, skipped + num_blocks, kv, dtype, device)
    order = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    tables = order[-1].repeat(len(lengths), max(counts)).int()
    is_owned = torch.zeros(num_blocks, heads.block_size, dtype=torch.bool, device=device)
    first = 0
    for sequence, ((_, context), count) in enumerate(zip(lengths, counts, strict=True)):
        own = order[first : first + count]
        tables[sequence, :count] = own
        places = torch.arange(count * heads.block_size, device=device) < context
        is_owned[own] = places.view(count, heads.block_size)
        first += count
    _fill(behind(cache, skipped), is_owned, generator)
    ends = torch.tensor([0, *(rows for rows, _ in lengths)], device=device).cumsum(0).int()
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device)
    num_rows, num_heads = sum(rows for rows, _ in lengths), heads.num_kv_heads * heads.num_groups
    width = (num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return PagedInputs(
        normal(generator, num_rows, width, dtype=dtype),
        cache,
        PagedRows(ends, contexts, tables + skipped, num_rows, max(rows for rows, _ in lengths)),
        torch.full((num_rows, num_heads * heads.head_dim), torch.nan, dtype=dtype, device=device),
    )


def layer_kv(
    heads: HeadShape, num_blocks: int, kv: KVName, dtype: torch.dtype, device: torch.device
) -> LayerKV:
    """One layer's cache, as an engine has it."""
    shape = KVShape(1, num_blocks, heads.block_size, heads.num_kv_heads, heads.head_dim)
    kept = dtype if kv == "bfloat16" else KEPT[kv]
    return KVCache(shape, heads.num_groups, dtype, device, [], kept).layers[0]


def behind(cache: LayerKV, skipped: int) -> LayerKV:
    """Its blocks but for the first so many."""
    return LayerKV(cache.numbers[skipped:], None if cache.scales is None else cache.scales[skipped:])


def _fill(cache: LayerKV, is_owned: Tensor, generator: Generator) -> None:
    """Heads and tokens are of unlike size, as models have them."""
    for first in range(0, len(is_owned), BLOCKS_AT_ONCE):
        blocks = slice(first, first + BLOCKS_AT_ONCE)
        shape = cache.numbers[blocks].shape
        wide = normal(generator, *shape, dtype=torch.float32)
        wide *= torch.rand(*shape[:-1], 1, generator=generator, device=generator.device) * 2 + 0.1
        nobody = ~is_owned[blocks, None, :].expand(shape[:-1])
        if cache.scales is None:
            wide[nobody] = torch.nan
            cache.numbers[blocks] = wide.to(cache.numbers.dtype)
            continue
        codes, scales = to_codes(wide, cache.numbers.dtype)
        as_bytes = codes.view(torch.uint8)
        if codes.dtype != torch.int8:
            as_bytes[nobody] = NOT_A_CODE
        scales[nobody] = torch.nan
        cache.numbers.view(torch.uint8)[blocks] = as_bytes
        cache.scales[blocks] = scales


def _dense(heads: HeadShape, batch: int, rows: int, context: int, generator: Generator) -> list[Tensor]:
    """Queries, keys and values of equal sequences in one piece: [batch, heads, tokens, head_dim]."""
    num_heads = heads.num_kv_heads * heads.num_groups
    query = normal(generator, batch, num_heads, rows, heads.head_dim)
    kv = [normal(generator, batch, heads.num_kv_heads, context, heads.head_dim) for _ in range(2)]
    return [query, *kv]


def _decode_peers(heads: HeadShape, lengths: Lengths, generator: Generator) -> dict[str, Peer]:
    """Where all sequences are alike. They are given keys and values in one piece, without blocks."""
    (rows, context), batch = lengths[0], len(lengths)
    if rows > 1 or any(one != lengths[0] for one in lengths):
        return {}

    def sdpa() -> Callable[[], object]:
        query, key, value = _dense(heads, batch, 1, context, generator)
        attend: Any = functional.scaled_dot_product_attention
        return lambda: attend(query, key, value, enable_gqa=True)

    def flex() -> Callable[[], object]:
        query, key, value = _dense(heads, batch, 1, context, generator)
        attend = _flex_attention(generator)
        return lambda: attend(query, key, value, enable_gqa=True)

    is_large = batch * context >= LEAST_FLEX_TOKENS or generator.device.type == "cpu"
    return {"sdpa": sdpa, "flex": flex} if is_large else {"sdpa": sdpa}


def _prefill_peers(heads: HeadShape, length: tuple[int, int], generator: Generator) -> dict[str, Peer]:
    """PyTorch's FlashAttention and cuDNN's, and flex attention for a whole prompt."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    rows, context = length

    def by(backends: list[SDPBackend]) -> Peer:
        def sdpa() -> Callable[[], object]:
            query, key, value = _dense(heads, 1, rows, context, generator)
            attend: Any = functional.scaled_dot_product_attention
            is_whole = rows == context
            mask = None if is_whole else causal_lower_right(rows, context)

            def run() -> object:
                with sdpa_kernel(backends):
                    return attend(query, key, value, mask, is_causal=is_whole, enable_gqa=True)

            return run

        return sdpa

    def flex() -> Callable[[], object]:
        from torch.nn.attention.flex_attention import create_block_mask

        query, key, value = _dense(heads, 1, rows, context, generator)
        device = str(generator.device)
        mask = create_block_mask(
            lambda _b, _h, row, column: row >= column, None, None, rows, context, device=device
        )
        attend = _flex_attention(generator)
        return lambda: attend(query, key, value, block_mask=mask, enable_gqa=True)

    if generator.device.type == "cpu":
        peers = {"flash": by([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])}
    else:
        peers = {"flash": by([SDPBackend.FLASH_ATTENTION]), "cudnn": by([SDPBackend.CUDNN_ATTENTION])}
    return peers | {"flex": flex} if rows == context else peers


def _flex_attention(generator: Generator) -> Callable[..., Any]:
    """Compiled, as it is meant to be used; on a CPU, where that takes a compiler of C++, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    if generator.device.type == "cpu":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled

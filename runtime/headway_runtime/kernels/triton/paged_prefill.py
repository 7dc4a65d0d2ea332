"""Attention of many tokens per sequence (prompts, or chunks of them) over the paged cache, causal.

Work is products: `4 * heads * head_dim` operations for each pair of a token and one that it sees. A prompt of
8,192 tokens, 32 heads of 128: 0.55 TFLOP a layer, 0.70 ms at the 788 TFLOP/s that bfloat16 products reach on
an H200. Softmax does not overlap fully with products in a kernel of one role per warp: 50-60% of that is
expected (FlashAttention-2's part, which PyTorch has, is 45-50%; FlashAttention-3's 75%). Bytes do not matter
beyond a few hundred tokens: a tile of keys serves all query heads of its KV head and 128 / groups tokens, and
neighbours read it from the L2 cache.

How it gets there. A program has `rows` queries: tokens of one sequence times the heads that share a KV head,
so that a tile is read once for all of them and short chunks fill a product sooner. With 128 rows of 128
numbers in bfloat16 that is 32 bytes for each cycle of products, near what the L2 cache gives a
multiprocessor; with 64 it would be twice that. 8 warps, two groups of four with 64 rows each: with 4,
registers spill. Tiles that all rows see whole are attended to without masks; those at the diagonal and at a
window's far edge have a loop each. Programs of the latest tokens, which see most, start first, and all of one
head run beside each other, so that what a head keeps (4 MB for 8,192 tokens) stays in the L2 cache. The grid
is the most that so many rows and sequences may need; a program without work ends at once.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.attention_tiles import (
    STEP_INTEGERS,
    STEP_POINTERS,
    TRITON_TYPES,
    HeadShape,
    as_loaded,
    attend_tile,
    coding_of,
    compiled_types,
    load_queries,
    no_sums,
    operand_of,
    shape_class,
    spill_bytes_allowed,
    whole_sums,
)
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.paged_rows import PagedRows, Scoring

KERNEL = "paged_prefill"
# Bytes of a thread that lie in local memory with some versions of the compiler (Triton 3.6's keeps them
# there, 3.9's does not): ten registers with what is needed before and after the loops over tiles. They are
# stored once and loaded once for a program, which takes tens of thousands of cycles; of one configuration (16
# bits, capability 8.0) one of them is loaded once a tile, of some thousand cycles.
SPILLED_AROUND_LOOPS = 40

# What benchmarks/gpu/tune.py tries, by class of shapes.
CANDIDATES = {
    "default": [
        {"rows": rows, "keys": keys, "num_warps": num_warps, "num_stages": num_stages}
        for rows, keys, num_warps in ((128, 64, 8), (128, 128, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4))
        for num_stages in (2, 3, 5, 7)
    ]
}


@triton.jit(do_not_specialize=STEP_INTEGERS, do_not_specialize_on_alignment=STEP_POINTERS)
def paged_prefill_kernel(
    query,
    out,
    numbers,
    scales,
    tables,
    context_lengths,
    query_starts,
    query_stride,
    out_stride,
    block_stride,
    scale_block_stride,
    table_stride,
    num_sequences,
    score_factor,
    soft_cap,
    window,
    has_window: tl.constexpr,
    has_soft_cap: tl.constexpr,
    num_kv_heads: tl.constexpr,
    num_groups: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    coding: tl.constexpr,
    operand: tl.constexpr,
    rows: tl.constexpr,
    sequence_capacity: tl.constexpr,
    keys: tl.constexpr,
):
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    tokens: tl.constexpr = rows // num_groups

    # Which sequence this program's tokens are of, and which of its they are.
    index = tl.arange(0, sequence_capacity)
    is_sequence = index < num_sequences
    starts = tl.load(query_starts + index, mask=is_sequence, other=0)
    counts = tl.load(query_starts + index + 1, mask=is_sequence, other=0) - starts
    program_counts = tl.cdiv(counts, tokens)
    ends = tl.cumsum(program_counts, 0)
    if program >= tl.sum(program_counts, 0):
        return
    sequence = tl.sum((ends <= program).to(tl.int32), 0)
    first_program = tl.sum(tl.where(index == sequence, ends - program_counts, 0), 0)
    first_token = (program - first_program) * tokens

    context = tl.load(context_lengths + sequence)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    row = tl.arange(0, rows)
    dims = tl.arange(0, padded_dim)
    token = first_token + row // num_groups
    query_head = head * num_groups + row % num_groups
    is_row = (token < num_queries) & (row < tokens * num_groups)
    is_used = is_row[:, None] & (dims < head_dim)[None, :]
    row_place = (first_row + token).to(tl.int64)
    head_place = (query_head * head_dim)[:, None] + dims[None, :]
    own_place = query + (row_place * query_stride + query_head * head_dim)[:, None]
    own, odd_own = load_queries(own_place, is_row[:, None], head_dim, padded_dim, coding)
    own, odd_own = own.to(operand), odd_own.to(operand)

    # Positions of the first and the last token; rows of nobody stand at the last one's.
    before = context - num_queries
    first_position = before + first_token
    last_position = tl.minimum(first_position + tokens, context) - 1
    row_position = tl.minimum(before + token, last_position)
    # Tiles [first, whole), [whole, diagonal) and [diagonal, end); those between are seen whole by all rows.
    end = tl.cdiv(last_position + 1, keys)
    diagonal = (first_position + 1) // keys
    first = 0
    whole = 0
    if has_window:
        first = tl.maximum(first_position + 1 - window, 0) // keys
        whole = tl.cdiv(tl.maximum(last_position + 1 - window, 0), keys)
        diagonal = tl.maximum(diagonal, first)
        whole = tl.minimum(whole, diagonal)

    table = tables + sequence.to(tl.int64) * table_stride
    maximum = tl.full((rows,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((rows,), dtype=tl.float32)
    sums, odd_sums = no_sums(rows, padded_dim, coding)
    for stretch in tl.static_range(3):
        # The middle one has no masks; without a window there is no first.
        if has_window or stretch > 0:
            if stretch == 0:
                low, high = first, whole
            elif stretch == 1:
                low, high = whole, diagonal
            else:
                low, high = diagonal, end
            for number in tl.range(low, high):
                maximum, total, sums, odd_sums = attend_tile(
                    own,
                    odd_own,
                    maximum,
                    total,
                    sums,
                    odd_sums,
                    number * keys + tl.arange(0, keys),
                    context,
                    row_position,
                    table,
                    head,
                    numbers,
                    scales,
                    block_stride,
                    scale_block_stride,
                    score_factor,
                    soft_cap,
                    window,
                    stretch != 1,
                    has_window,
                    has_soft_cap,
                    num_kv_heads,
                    head_dim,
                    padded_dim,
                    block_size,
                    coding,
                    operand,
                )

    sums = whole_sums(sums, odd_sums, rows, padded_dim, coding)
    attended = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    out_place = out + (row_place * out_stride)[:, None] + head_place
    tl.store(out_place, attended.to(out.dtype.element_ty), mask=is_used)


def _cases() -> Iterator[CompileCase]:
    """Of each configuration attention with window and soft cap, of some also without."""
    for one in configurations(KERNEL):
        own, options = split_options(one.values)
        for capability in one.capabilities:
            signature, constants = compiled_types(one.shape_class, capability)
            for has_all in (False, True):
                if not has_all and not one.shape_class.endswith("-d128"):
                    continue
                flags = {"has_window": has_all, "has_soft_cap": has_all}
                label = f"{one.label} {'window, soft cap' if has_all else 'plain'}"
                yield CompileCase(
                    label,
                    paged_prefill_kernel,
                    signature,
                    constants | own | flags,
                    options,
                    (capability,),
                    max(SPILLED_AROUND_LOOPS, spill_bytes_allowed(one.shape_class, options)),
                )


COMPILED = list(_cases())


def paged_prefill(
    query: Tensor,
    numbers: Tensor,
    scales: Tensor | None,
    which: PagedRows,
    scoring: Scoring,
    num_groups: int,
    out: Tensor,
    chosen: dict[str, int] | None = None,
) -> None:
    """query: [rows, heads * head_dim and more], rotated. out: [rows, heads * head_dim], of the same type.

    numbers: [blocks, 2 * kv_heads, block_size, head_dim]; scales: float32 [blocks, 2 * kv_heads, block_size].
    chosen: a configuration, instead of the table's. All rows of `which` are written, and no others.
    """
    _, num_planes, block_size, head_dim = numbers.shape
    shape = HeadShape(num_planes // 2, num_groups, head_dim, block_size)
    gpu = gpu_of(query.device)
    coding = coding_of(numbers.dtype, gpu)
    if chosen is None:
        chosen = configuration(KERNEL, shape_class(query.dtype, coding, shape), gpu)
    constants, options = split_options(chosen)
    constants["rows"] = max(constants["rows"], triton.next_power_of_2(num_groups))
    tokens = constants["rows"] // num_groups
    programs = which.num_rows // tokens + which.num_sequences
    loaded = as_loaded(numbers, coding)
    kept_scales = which.context_lengths if scales is None else scales
    paged_prefill_kernel[(programs, shape.num_kv_heads)](
        query,
        out,
        loaded,
        kept_scales,
        which.tables,
        which.context_lengths,
        which.query_starts,
        query.stride(0),
        out.stride(0),
        loaded.stride(0),
        kept_scales.stride(0),
        which.tables.stride(0),
        which.num_sequences,
        **scoring.arguments(),
        num_kv_heads=shape.num_kv_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        padded_dim=shape.padded_dim,
        block_size=block_size,
        coding=coding,
        operand=TRITON_TYPES[operand_of(query.dtype, coding)],
        sequence_capacity=which.sequence_capacity,
        **constants,
        **options,
    )

"""Kernels of libraries that serve the same purpose, on the same inputs as ours: FlashInfer's attention over a
paged cache, GemLite's products of 4-bit codes. Each where it can be imported, and a line where it cannot.

What a library computes is compared with a reference in float32 before anything is timed. What keeps one from
running (it may want to compile with a toolkit that is not there) stands in its row, and is no fault of ours.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from benchmarks.gpu import costs
from benchmarks.gpu.cases.attention import BLOCK_SIZE, PagedInputs, heads_of, paged_inputs
from benchmarks.gpu.cases.case import Peer, Result, error_of, generator_on, normal
from benchmarks.gpu.cases.products import random_codes
from benchmarks.gpu.costs import WEIGHT_BITS, Cost, ModelShape, model_shape
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.shapes import LLAMA_8B
from benchmarks.gpu.timing import Timing, num_sets, timed
from torch import Generator, Tensor

from headway_runtime.config import Device
from headway_runtime.kernels.triton.attention_reference import reference_attention
from headway_runtime.kernels.triton.attention_tiles import HeadShape
from headway_runtime.kernels.triton.coded_product import CodedProduct
from headway_runtime.kernels.triton.paged_decode import make_workspace, paged_decode
from headway_runtime.kernels.triton.paged_prefill import paged_prefill
from headway_runtime.kernels.triton.paged_rows import Scoring

SEED = 20261122
# Between results in bfloat16.
TOLERANCE = 1e-2
# FlashInfer's, where parts of sequences are added up; what its documentation takes.
WORKSPACE_BYTES = 128 << 20
GROUP_SIZE = 128
NIBBLES = 16
ROW_SECONDS = 45.0
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work by us and by a library, on one set of inputs, and what the library is to give."""

    ours: Peer
    theirs: Call
    exact: Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Comparison:
    """module: to be imported. make: with that module, on random inputs."""

    module: str
    name: str
    cost: Cost
    make: Callable[[Any, Generator], Pair]


def comparisons(model: ModelShape) -> list[Comparison]:
    """At the shapes of which the goals speak."""
    decodes, prompt = [(1, 8192)] * 32, [(8192, 8192)]
    found = [
        Comparison(
            "flashinfer",
            "flashinfer, decode attention, 32 at 8192",
            costs.attention(model, decodes, "bfloat16"),
            partial(attention_pair, model=model, lengths=decodes),
        ),
        Comparison(
            "flashinfer",
            "flashinfer, prefill attention, 8192 of 8192",
            costs.attention(model, prompt, "bfloat16"),
            partial(attention_pair, model=model, lengths=prompt),
        ),
    ]
    outputs, inputs = model.projections["gate_up"]
    products = [
        Comparison(
            "gemlite.core",
            f"gemlite, int4 product, {rows} x {outputs} x {inputs}",
            costs.product(rows, outputs, inputs, bits=WEIGHT_BITS["int4"]),
            partial(product_pair, rows=rows, shape=(outputs, inputs)),
        )
        for rows in (1, 32)
    ]
    return found + products


def run_library_peers(report: Report, device: Device) -> None:
    """A row for each comparison, a line for each library that is not there."""
    missing: set[str] = set()
    for one in comparisons(model_shape(LLAMA_8B)):
        library = one.module.partition(".")[0]
        if library in missing:
            continue
        if importlib.util.find_spec(library) is None:
            missing.add(library)
            print(f"peers | {library} | left out: it is not installed")
            continue
        report.row("peers", one.name, partial(_measured, one, device), needs_seconds=ROW_SECONDS)


def _measured(one: Comparison, device: Device) -> Row:
    """over_ours: how many times as long they take."""
    try:
        module = importlib.import_module(one.module)
        count = num_sets(one.cost.num_bytes, device)
        pairs = [one.make(module, generator_on(device, SEED + number)) for number in range(count)]
        error = error_of(pairs[0].theirs(), pairs[0].exact())
        theirs = timed([pair.theirs for pair in pairs], device)
    except Exception as raised:  # noqa: BLE001 - a library that cannot do it here is told of, not a fault
        return {"failed": f"{type(raised).__name__}: {raised}"[:300]}
    ours: Timing = timed([pair.ours() for pair in pairs], device)
    return {
        "microseconds": theirs.microseconds,
        "ours_microseconds": ours.microseconds,
        "over_ours": theirs.microseconds / ours.microseconds,
        "error_of_theirs": error,
        "is_comparable": error <= TOLERANCE,
    }


def attention_pair(
    flashinfer: Any, generator: Generator, *, model: ModelShape, lengths: list[tuple[int, int]]
) -> Pair:
    """lengths: rows and context of each sequence; one row of each is a decode."""
    heads, scoring = heads_of(model), Scoring(model.head_dim**-0.5)
    inputs = paged_inputs(heads, lengths, "bfloat16", torch.bfloat16, generator)
    which, numbers, groups = inputs.which, inputs.kv.numbers, heads.num_groups

    def ours() -> Callable[[], object]:
        if which.max_queries > 1:
            return lambda: paged_prefill(inputs.query, numbers, None, which, scoring, groups, inputs.out)
        workspace = make_workspace(heads, 1, which.num_sequences, generator.device)
        return lambda: paged_decode(
            inputs.query, numbers, None, which, scoring, groups, workspace, inputs.out
        )

    def exact() -> Result:
        return reference_attention(inputs.query, numbers, None, which, scoring, groups)

    return Pair(ours, flashinfer_attention(flashinfer, inputs, heads, lengths), exact)


def flashinfer_attention(
    flashinfer: Any, inputs: PagedInputs, heads: HeadShape, lengths: list[tuple[int, int]]
) -> Call:
    """Planned beforehand, as servers do once a step. Its "HND" pages are our blocks: [pages, keys or values,
    heads, tokens, numbers]."""
    device = inputs.query.device
    num_heads = heads.num_kv_heads * heads.num_groups
    pages = inputs.kv.numbers.view(-1, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    counts = [-(-context // BLOCK_SIZE) for _, context in lengths]
    tables = inputs.which.tables
    indices = torch.cat([tables[row, :count] for row, count in enumerate(counts)]).int()
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    last = torch.tensor(
        [context - (count - 1) * BLOCK_SIZE for (_, context), count in zip(lengths, counts, strict=True)],
        dtype=torch.int32,
        device=device,
    )
    size = num_heads * heads.head_dim
    query = inputs.query[:, :size].contiguous().view(-1, num_heads, heads.head_dim)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    shape = (num_heads, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE)
    types = {"q_data_type": query.dtype, "kv_data_type": pages.dtype}
    if inputs.which.max_queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(starts, indices, last, *shape, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(inputs.which.query_starts, starts, indices, last, *shape, causal=True, **types)

    def run() -> Tensor:
        found: Tensor = wrapper.run(query, pages)
        return found.flatten(1)

    return run


def product_pair(gemlite: Any, generator: Generator, *, rows: int, shape: tuple[int, int]) -> Pair:
    """Its codes are not ours: each has its own random ones of the same size."""
    outputs, inputs = shape
    own = random_codes("int4", shape, generator, group_size=GROUP_SIZE)
    x = normal(generator, rows, inputs)

    def ours() -> Callable[[], object]:
        product = CodedProduct(own, None)
        return lambda: product(x)

    device = generator.device
    codes = torch.randint(0, NIBBLES, shape, generator=generator, device=device, dtype=torch.uint8)
    groups = outputs * inputs // GROUP_SIZE
    scales = torch.rand((groups, 1), generator=generator, device=device).add_(0.5).mul_(1e-2).to(x.dtype)
    zeros = torch.full_like(scales, NIBBLES / 2)
    theirs = gemlite_product(gemlite, codes, scales, zeros)
    numbers = (codes.float().view(-1, GROUP_SIZE) - zeros.float()) * scales.float()
    weight = numbers.to(x.dtype).view(shape)
    return Pair(ours, lambda: theirs(x), lambda: functional.linear(x.float(), weight.float()))


def gemlite_product(gemlite: Any, codes: Tensor, scales: Tensor, zeros: Tensor) -> Callable[[Tensor], Tensor]:
    """codes: uint8 [outputs, inputs]. scales, zeros: [groups, 1], of a weight's inputs one group behind the
    other."""
    outputs, inputs = codes.shape
    dtype = gemlite.TORCH_TO_DTYPE[scales.dtype]
    linear = gemlite.GemLiteLinear(
        4,
        group_size=GROUP_SIZE,
        in_features=inputs,
        out_features=outputs,
        input_dtype=dtype,
        output_dtype=dtype,
    )
    linear.pack(codes, scales, zeros, None)
    product: Callable[[Tensor], Tensor] = linear
    return product

"""Attention of few tokens per sequence (decodes, and guesses that are verified) over the paged cache.

Keys and values are each read once, so time is their bytes over bandwidth:
`2 * kv_heads * head_dim * bytes * sum(context_lengths)`, and for codes 8 bytes a token and head more; queries
and output are nothing beside it. Batch 32 at 8,192 tokens, 8 heads of 128: in bfloat16 1.07 GB, 0.25 ms at
the 4.3 TB/s that a copy reaches on an H200; of codes 0.55 GB, 0.13 ms. Measured: 0.26 ms in
bfloat16 (96% of that), and 0.24 of codes, whose conversions take longer than their bytes (54%); 8 us for one
sequence of 512 tokens, 25 for one of 8,192 (32%): trips to memory one after the other.

How it gets there. All tiles of all (sequence, head) pairs stand in one line, which is cut into equal
stretches, one for each program of a grid that is as large as the GPU: whatever the lengths are, all
multiprocessors are busy to the end, and the grid is the same at every step, as a CUDA graph needs it. Of few
sequences the pieces are up to twice as long, so that whoever puts a pair together has fewer parts. A pair
that lies in several stretches is put together by the program that finishes its part last; the others leave
maxima, totals and sums in a workspace. So there is one launch and no second kernel, nobody waits, and as
parts are added in their order, the same step gives the same numbers.

The query heads that share a KV head are rows of one product, with all tokens of the sequence: 16 rows at
least, whose products take a quarter of the time that the tile takes to come. A tile of 64 keys is 32 KB, and
of bandwidth a multiprocessor has 19 bytes a cycle: 1,700 cycles. Its softmax is a chain of about 1,500, so
three programs share a multiprocessor, as far as registers allow (168 a thread with 4 warps). Each has a tile
or two on their way: well over the 23 KB that must be in flight (4.3 TB/s for 700 ns over 132).
64 rows (guesses, and five or more query heads to a KV head) have entries of their own in the tables: their
products take about as long as the tile, and registers are there for two programs.
Of `num_stages`, Triton gives half to the block table's numbers, on which addresses wait: 3 is one tile of
keys and values, 5 two, 7 three. Blocks are contiguous for each head, 4 KB in bfloat16, so loads are of 16
bytes a thread, 256 or more in a row.
"""

from collections.abc import Iterator

import torch
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
from headway_runtime.kernels.triton.decode_parts import DecodeWorkspace, dims_merged_at_once, merged_parts
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    Configuration,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import launched_early, let_next_begin, wait_for_last
from headway_runtime.kernels.triton.paged_rows import (
    LEAST_ROWS,
    MOST_ROWS,
    SEQUENCE_CAPACITIES,
    PagedRows,
    Scoring,
    used_rows_for,
)

# Kernels of the tables: up to so many rows of a product, and above it. Of float32 in heads of 256 the latter
# do not fit the multiprocessors of 8.0.
KERNEL, WIDE_KERNEL = "paged_decode", "paged_decode_wide"
MOST_NARROW_ROWS = 32


@triton.jit(do_not_specialize=STEP_INTEGERS, do_not_specialize_on_alignment=STEP_POINTERS)
def paged_decode_kernel(
    query,
    out,
    numbers,
    scales,
    tables,
    context_lengths,
    query_starts,
    part_softmax,
    part_sums,
    arrivals,
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
    used_rows: tl.constexpr,
    sequence_capacity: tl.constexpr,
    keys: tl.constexpr,
    least_tiles: tl.constexpr,
    most_parts: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    program = tl.program_id(0)
    row = tl.arange(0, rows)
    dims = tl.arange(0, padded_dim)

    # Where each sequence's tiles end in the line, and this program's stretch of it.
    index = tl.arange(0, sequence_capacity)
    is_sequence = index < num_sequences
    contexts = tl.load(context_lengths + index, mask=is_sequence, other=0)
    starts = tl.load(query_starts + index, mask=is_sequence, other=0)
    counts = tl.load(query_starts + index + 1, mask=is_sequence, other=0) - starts
    tile_counts = tl.cdiv(contexts, keys)
    if has_window:
        tile_counts -= tl.maximum(contexts - counts + 1 - window, 0) // keys
    # One that has rows but no context has a tile of nothing, which gives its rows zeros.
    tile_counts = tl.where(counts > 0, tl.maximum(tile_counts, 1), 0) * num_kv_heads
    ends = tl.cumsum(tile_counts, 0)
    num_all = tl.sum(tile_counts, 0)
    even = tl.cdiv(num_all, tl.num_programs(0))
    few_parts = tl.cdiv(tl.max(tile_counts, 0) // num_kv_heads, most_parts)
    stretch = tl.maximum(tl.maximum(even, least_tiles), tl.minimum(few_parts, 2 * even))
    position = program * stretch
    end = tl.minimum(position + stretch, num_all)

    while position < end:
        sequence = tl.sum((ends <= position).to(tl.int32), 0)
        sequence_end = tl.sum(tl.where(index == sequence, ends, 0), 0)
        num_tiles = tl.sum(tl.where(index == sequence, tile_counts, 0), 0) // num_kv_heads
        local = position - (sequence_end - num_tiles * num_kv_heads)
        head = local // num_tiles
        tile = local % num_tiles
        tile_end = tl.minimum(num_tiles, tile + end - position)

        context = tl.load(context_lengths + sequence)
        first_row = tl.load(query_starts + sequence)
        num_queries = tl.load(query_starts + sequence + 1) - first_row
        first_tile = 0
        if has_window:
            first_tile = tl.maximum(context - num_queries + 1 - window, 0) // keys
        token = row // num_groups
        query_head = head * num_groups + row % num_groups
        is_row = token < num_queries
        is_used = is_row[:, None] & (dims < head_dim)[None, :]
        row_place = (first_row + token).to(tl.int64)
        head_place = (query_head * head_dim)[:, None] + dims[None, :]
        wait_for_last(overlaps)
        own_place = query + (row_place * query_stride + query_head * head_dim)[:, None]
        own, odd_own = load_queries(own_place, is_row[:, None], head_dim, padded_dim, coding)
        own, odd_own = own.to(operand), odd_own.to(operand)

        maximum = tl.full((rows,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((rows,), dtype=tl.float32)
        sums, odd_sums = no_sums(rows, padded_dim, coding)
        for number in tl.range(tile, tile_end):
            maximum, total, sums, odd_sums = attend_tile(
                own,
                odd_own,
                maximum,
                total,
                sums,
                odd_sums,
                (first_tile + number) * keys + tl.arange(0, keys),
                context,
                context - num_queries + token,
                tables + sequence.to(tl.int64) * table_stride,
                head,
                numbers,
                scales,
                block_stride,
                scale_block_stride,
                score_factor,
                soft_cap,
                window,
                True,
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
        row_out = out + (row_place * out_stride)[:, None] + head_place
        if tile_end - tile == num_tiles:
            attended = sums / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(row_out, attended.to(out.dtype.element_ty), mask=is_used)
        else:
            # A part of a pair: each program has at most one that is a pair's beginning and one that is not.
            part = 2 * program + 1 - tl.minimum(tile, 1)
            is_kept = row < used_rows
            tl.store(part_softmax + part * (2 * used_rows) + row, maximum, mask=is_kept)
            tl.store(part_softmax + part * (2 * used_rows) + used_rows + row, total, mask=is_kept)
            part_place = part_sums + part.to(tl.int64) * (used_rows * padded_dim)
            part_place += row[:, None] * padded_dim + dims[None, :]
            tl.store(part_place, sums, mask=is_kept[:, None] & (dims < head_dim)[None, :])
            pair_start = position - tile
            first_program = pair_start // stretch
            num_parts = (pair_start + num_tiles - 1) // stretch - first_program + 1
            # All threads have stored before one of them says so; who is last sees what all have stored.
            tl.debug_barrier()
            arrival = arrivals + sequence * num_kv_heads + head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrival, 0)
                used_row = tl.arange(0, used_rows)
                used_token = used_row // num_groups
                used_head = head * num_groups + used_row % num_groups
                used_place = (first_row + used_token).to(tl.int64) * out_stride + used_head * head_dim
                num_dims: tl.constexpr = dims_merged_at_once(used_rows, padded_dim)
                for first_dim in tl.range(0, head_dim, num_dims):
                    attended = merged_parts(
                        part_softmax,
                        part_sums,
                        first_program,
                        num_parts,
                        first_dim,
                        used_rows,
                        head_dim,
                        padded_dim,
                        num_dims,
                    )
                    own_dims = first_dim + tl.arange(0, num_dims)
                    tl.store(
                        out + used_place[:, None] + own_dims[None, :],
                        attended.to(out.dtype.element_ty),
                        mask=(used_token < num_queries)[:, None] & (own_dims < head_dim)[None, :],
                    )
        position += tile_end - tile
    # Who has nothing to do, too.
    wait_for_last(overlaps)


def table_kernel(used_rows: int) -> str:
    """Whose entries in the tables are for products of so many rows."""
    return KERNEL if used_rows <= MOST_NARROW_ROWS else WIDE_KERNEL


def _cases() -> Iterator[CompileCase]:
    """Of each configuration the most rows that it serves, with window and soft cap, of a thousand sequences;
    of some also few sequences of one token, without either."""
    few, _, many, _ = SEQUENCE_CAPACITIES
    for kernel, used_rows, num_groups in ((KERNEL, MOST_NARROW_ROWS, 4), (WIDE_KERNEL, MOST_ROWS, 8)):
        for one in configurations(kernel):
            for capability in one.capabilities:
                yield _case(one, capability, used_rows, num_groups, many, has_all=True)
                if kernel == KERNEL and one.shape_class.endswith("-d128"):
                    yield _case(one, capability, num_groups, num_groups, few, has_all=False)


def _case(
    one: Configuration, capability: int, used_rows: int, num_groups: int, capacity: int, *, has_all: bool
) -> CompileCase:
    own, options = split_options(one.values)
    del own["programs_per_multiprocessor"]
    signature, constants = compiled_types(one.shape_class, capability)
    signature |= {"part_softmax": "*fp32", "part_sums": "*fp32", "arrivals": "*i32"}
    constants |= {"sequence_capacity": capacity, "num_groups": num_groups}
    constants |= {"has_window": has_all, "has_soft_cap": has_all}
    constants |= {"rows": max(LEAST_ROWS, used_rows), "used_rows": used_rows}
    return CompileCase(
        f"{one.label} rows={used_rows}",
        paged_decode_kernel,
        signature,
        constants | own,
        options,
        (capability,),
        spill_bytes_allowed(one.shape_class, options),
    )


COMPILED = list(_cases())


def make_workspace(
    shape: HeadShape, max_queries: int, max_sequences: int, device: torch.device
) -> DecodeWorkspace:
    """For any configuration of the tables. max_queries: of a sequence."""
    rows = used_rows_for(max_queries, shape.num_groups)
    programs = gpu_of(device).num_multiprocessors * max(
        one.values["programs_per_multiprocessor"]
        for kernel in (KERNEL, WIDE_KERNEL)
        for one in configurations(kernel)
    )
    return DecodeWorkspace(
        torch.empty((2 * programs, 2, rows), dtype=torch.float32, device=device),
        torch.empty((2 * programs, rows, shape.padded_dim), dtype=torch.float32, device=device),
        torch.zeros(max_sequences * shape.num_kv_heads, dtype=torch.int32, device=device),
    )


def paged_decode(
    query: Tensor,
    numbers: Tensor,
    scales: Tensor | None,
    which: PagedRows,
    scoring: Scoring,
    num_groups: int,
    workspace: DecodeWorkspace,
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
    used_rows = used_rows_for(which.max_queries, num_groups)
    if chosen is None:
        chosen = configuration(table_kernel(used_rows), shape_class(query.dtype, coding, shape), gpu)
    constants, options = split_options(chosen)
    programs = gpu.num_multiprocessors * constants.pop("programs_per_multiprocessor")
    assert which.max_queries * num_groups <= used_rows
    assert 2 * programs * used_rows * shape.padded_dim <= workspace.sums.numel()
    assert which.num_sequences * shape.num_kv_heads <= len(workspace.arrivals)
    loaded = as_loaded(numbers, coding)
    kept_scales = workspace.softmax if scales is None else scales
    paged_decode_kernel[(programs,)](
        query,
        out,
        loaded,
        kept_scales,
        which.tables,
        which.context_lengths,
        which.query_starts,
        workspace.softmax,
        workspace.sums,
        workspace.arrivals,
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
        rows=max(LEAST_ROWS, used_rows),
        used_rows=used_rows,
        sequence_capacity=which.sequence_capacity,
        **constants,
        **options,
        **launched_early(gpu),
    )

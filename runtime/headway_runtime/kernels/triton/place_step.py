"""A recorded decode step begins here: its rows' tokens and block tables, put where its other kernels look.

A CUDA graph reads the same addresses each time, so tables stand in rows of the longest sequence there can be.
What the host sends is no wider than the step's longest table (one copy, a few kilobytes instead of
megabytes); this spreads it. A row's token is the host's, or, where the host does not know it yet, one that
the step before has left on the device. A row that has none (its logits were not finite) computes token 0,
which nobody gets to see.

Bytes are nothing; the time is a launch's, 2 us.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import launched_early, let_next_begin, wait_for_last

KERNEL = "place_step"


@triton.jit
def place_step_kernel(
    width_pointer,
    sent_tables,
    context_lengths,
    given_tokens,
    sources,
    sampled_tokens,
    token_ids,
    tables,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One program per row."""
    let_next_begin(overlaps)
    wait_for_last(overlaps)
    row = tl.program_id(0)
    source = tl.load(sources + row)
    given = tl.load(given_tokens + row).to(tl.int64)
    sampled = tl.load(sampled_tokens + tl.maximum(source, 0))
    token = tl.where(source < 0, given, sampled)
    tl.store(token_ids + row, tl.maximum(token, 0))
    width = tl.load(width_pointer)
    num_blocks = tl.cdiv(tl.load(context_lengths + row), BLOCK_SIZE)
    for start in tl.range(0, num_blocks, TILE):
        column = start + tl.arange(0, TILE)
        is_block = column < num_blocks
        blocks = tl.load(sent_tables + row * width + column, mask=is_block, other=0)
        tl.store(tables + row * table_stride + column, blocks, mask=is_block)


def place_step(
    width: Tensor,
    sent_tables: Tensor,
    context_lengths: Tensor,
    given_tokens: Tensor,
    sources: Tensor,
    sampled_tokens: Tensor,
    token_ids: Tensor,
    tables: Tensor,
    block_size: int,
) -> None:
    """Writes `token_ids` (int64) of each row, and the row of `tables` as far as its context reaches.

    All others are int32. width: [1], of a row of `sent_tables`, which lie one behind the other.
    context_lengths: 0 for rows of nobody. sources: by row, a place in `sampled_tokens` (int64, -1 for none),
    or -1 where the token is the given one.
    """
    gpu = gpu_of(tables.device)
    constants, options = split_options(configuration(KERNEL, DEFAULT, gpu))
    place_step_kernel[(len(token_ids),)](
        width,
        sent_tables,
        context_lengths,
        given_tokens,
        sources,
        sampled_tokens,
        token_ids,
        tables,
        tables.stride(0),
        BLOCK_SIZE=block_size,
        **constants,
        **options,
        **launched_early(gpu),
    )


def place_step_by_torch(
    width: Tensor,
    sent_tables: Tensor,
    context_lengths: Tensor,
    given_tokens: Tensor,
    sources: Tensor,
    sampled_tokens: Tensor,
    token_ids: Tensor,
    tables: Tensor,
    block_size: int,
) -> None:
    """The reference."""
    own_width = int(width)
    for row in range(len(token_ids)):
        source = int(sources[row])
        token = int(given_tokens[row]) if source < 0 else int(sampled_tokens[source])
        token_ids[row] = max(0, token)
        count = -(-int(context_lengths[row]) // block_size)
        tables[row, :count] = sent_tables[row * own_width : row * own_width + count]


def _cases() -> list[CompileCase]:
    cases = []
    for one in configurations(KERNEL):
        constants, options = split_options(one.values)
        pointers = ("width_pointer", "sent_tables", "context_lengths", "given_tokens", "sources", "tables")
        cases.append(
            CompileCase(
                one.label,
                place_step_kernel,
                {
                    **dict.fromkeys(pointers, "*i32"),
                    "sampled_tokens": "*i64",
                    "token_ids": "*i64",
                    "table_stride": "i32",
                },
                {"BLOCK_SIZE": 16, **constants},
                options,
                one.capabilities,
            )
        )
    return cases


COMPILED = _cases()

"""The k-th largest logit of a row, bit by bit and without sorting: how `draw` bounds top-k, see there."""

import triton
import triton.language as tl

from headway_runtime.kernels.triton.vocabulary import scaled


@triton.jit
def ordered(x):
    """uint32 that are ordered as float32 are."""
    bits = x.to(tl.uint32, bitcast=True)
    # Not `~bits`: Triton 3.6 interprets that by a number that uint32 does not hold.
    return tl.where(x < 0.0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def from_ordered(keys):
    bits = tl.where(keys >= 0x80000000, keys ^ 0x80000000, keys ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(x, k):
    """The k-th largest of a block of float32, bit by bit: [1]."""
    keys = ordered(x)
    found = tl.zeros((1,), tl.uint32)
    bit = tl.full((1,), 0x80000000, tl.uint32)
    for _ in range(32):
        tried = found | bit
        found = tl.where(tl.sum((keys >= tried).to(tl.int32), 0) >= k, tried, found)
        bit = bit >> 1
    return from_ordered(found)


@triton.jit
def count_at_least(
    row_pointer,
    tops_pointer,
    temperature,
    key,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many logits of the row, as `ordered` makes them, are not below the key [1]."""
    count = 0
    for first in range(0, NUM_BLOCKS, TILE_BLOCKS):
        blocks = first + tl.arange(0, TILE_BLOCKS)
        tops = tl.load(tops_pointer + blocks, mask=blocks < NUM_BLOCKS, other=float("-inf"))
        if tl.max((ordered(tops) >= key).to(tl.int32), 0) > 0:
            for start in range(0, BLOCK_SIZE, TILE):
                columns = start + tl.arange(0, TILE)
                x = scaled(row_pointer, blocks, columns, temperature, NUM_BLOCKS, BLOCK_SIZE)
                count += tl.sum(tl.sum((ordered(x) >= key).to(tl.int32), 1), 0)
    return count


@triton.jit
def kth_largest_of_row(
    row_pointer,
    tops_pointer,
    candidates_pointer,
    temperature,
    k,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The k-th largest logit of the row: a number. k: not above the vocabulary's size."""
    every = tl.arange(0, ALL_BLOCKS)
    tops = tl.load(tops_pointer + every, mask=every < NUM_BLOCKS, other=float("-inf"))
    least = float("-inf")
    if k <= NUM_BLOCKS:
        least = tl.max(kth_largest(tops, k), 0)
    count = 0
    for first in range(0, NUM_BLOCKS, TILE_BLOCKS):
        blocks = first + tl.arange(0, TILE_BLOCKS)
        own = tl.load(tops_pointer + blocks, mask=blocks < NUM_BLOCKS, other=float("-inf"))
        if (tl.max(own, 0) >= least) & (count <= CANDIDATES):
            for start in range(0, BLOCK_SIZE, TILE):
                columns = start + tl.arange(0, TILE)
                x = scaled(row_pointer, blocks, columns, temperature, NUM_BLOCKS, BLOCK_SIZE)
                flat = tl.reshape(x, (TILE_BLOCKS * TILE,))
                # What there is not is -inf, which would count where nothing bounds.
                is_candidate = ((flat >= least) & (flat > float("-inf"))).to(tl.int32)
                places = count + tl.cumsum(is_candidate, 0) - 1
                fits = (is_candidate > 0) & (places < CANDIDATES)
                tl.store(candidates_pointer + places, flat, mask=fits)
                count += tl.sum(is_candidate, 0)
    tl.debug_barrier()
    bound = float("-inf")
    if count <= CANDIDATES:
        places = tl.arange(0, CANDIDATES)
        x = tl.load(candidates_pointer + places, mask=places < count, other=float("-inf"))
        bound = tl.max(kth_largest(x, k), 0)
    else:
        found = tl.zeros((1,), tl.uint32)
        bit = tl.full((1,), 0x80000000, tl.uint32)
        for _ in range(32):
            tried = found | bit
            reached = count_at_least(
                row_pointer, tops_pointer, temperature, tried, NUM_BLOCKS, BLOCK_SIZE, TILE_BLOCKS, TILE
            )
            found = tl.where(reached >= k, tried, found)
            bit = bit >> 1
        bound = tl.max(from_ordered(found), 0)
    return bound

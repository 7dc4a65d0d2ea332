"""What products of rows with a weight have in common: classes of rows, how inputs are split, sums of splits.

A weight of few outputs makes fewer programs than a GPU has multiprocessors, so the inputs are split among
several programs of the same outputs. Each writes what it has to a place of its own; the one that arrives
last adds all of them up in their order, so that the sum does not depend on who that was, and needs no
second launch and no cleared output. Knows no form of weight.
"""

from bisect import bisect_left

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import Gpu

# Classes of shapes by rows: up to so many.
ROW_CLASSES = (1, 8, 16, 32, 64)
MANY_ROWS = "rows_many"
# A program that multiplies fewer blocks of inputs than this mostly starts and ends.
LEAST_BLOCKS_OF_SPLIT = 4
MOST_SPLITS = 16
TILES_PER_MULTIPROCESSOR = 4
# Of splits' numbers that a program reads at once: each trip to memory takes longer than all of them together.
SPLITS_NUMBERS: tl.constexpr = tl.constexpr(4096)
MOST_SPLITS_AT_ONCE: tl.constexpr = tl.constexpr(8)


def class_of_rows(num_rows: int) -> str:
    place = bisect_left(ROW_CLASSES, num_rows)
    return MANY_ROWS if place == len(ROW_CLASSES) else f"rows_{ROW_CLASSES[place]}"


def split_counters(gpu: Gpu, device: torch.device) -> Tensor:
    """Zeros, one for each tile that may be split: with more tiles than this there is nothing to split."""
    return torch.zeros(TILES_PER_MULTIPROCESSOR * gpu.num_multiprocessors, dtype=torch.int32, device=device)


def splits_of(num_programs: int, num_blocks: int, programs_per_multiprocessor: int, gpu: Gpu) -> int:
    """Among how many programs the blocks of inputs of each of `num_programs` tiles are split."""
    wanted = programs_per_multiprocessor * gpu.num_multiprocessors // max(1, num_programs)
    return max(1, min(wanted, num_blocks // LEAST_BLOCKS_OF_SPLIT, MOST_SPLITS))


def filled(num_splits: int, num_blocks: int) -> int:
    """So many splits or fewer, with which none has more blocks than with these, and none is without any: what
    belongs to a split's first block is read before it is known whether it has one."""
    blocks_of_split = -(-num_blocks // num_splits)
    return -(-num_blocks // blocks_of_split)


@triton.jit
def own_blocks(num_blocks, split, num_splits):
    """First and end of a split's blocks of inputs; of `filled` splits each has a block at least."""
    count = tl.cdiv(num_blocks, num_splits)
    first = split * count
    return first, tl.minimum(first + count, num_blocks)


@triton.jit
def arrives_last(
    own, partials, arrivals, tile, split, num_splits, is_inside, height: tl.constexpr, width: tl.constexpr
):
    """Leaves `own` [height, width] for whoever comes last, and says whether that is this program.

    partials: float32 or int32 [tiles, splits, height, width], of which only `is_inside` is written.
    arrivals: int32 [tiles], zeros before and after. Ordered by the release and acquire of the counter; the
    barrier before it makes all threads' numbers the counter's thread's own.
    """
    places = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    start = (tile * num_splits + split).to(tl.int64) * (height * width)
    tl.store(partials + start + places, own, mask=is_inside)
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
    return before == num_splits - 1


@triton.jit
def summed_splits(
    own, partials, arrivals, tile, num_splits, is_inside, height: tl.constexpr, width: tl.constexpr
):
    """The sum over all splits of a tile, in the splits' order, by the program that arrived last.

    Read past the first level of cache, which may hold what lay there before.
    """
    places = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    start = tile.to(tl.int64) * num_splits * (height * width)
    total = tl.zeros([height, width], own.dtype)
    at_once: tl.constexpr = max(1, min(MOST_SPLITS_AT_ONCE, SPLITS_NUMBERS // (height * width)))
    for first in range(0, num_splits, at_once):
        # Unrolled, so that no load waits for another one.
        for number in tl.static_range(at_once):
            # Of every number: the interpreter makes integers of a block of booleans and a single one.
            left = num_splits - first - number + tl.zeros([height, width], tl.int32)
            is_read = is_inside & (left > 0)
            total += tl.load(partials + start + places, mask=is_read, other=0, cache_modifier=".cg")
            start += height * width
    tl.store(arrivals + tile, 0)
    return total

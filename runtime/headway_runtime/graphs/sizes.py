"""Sizes of recorded steps: how many rows each computes. Arithmetic only; no torch.

A step of fewer sequences takes the next larger size that is recorded; its other rows belong to nobody. A size
costs its recording and a few megabytes, a row of nobody costs next to nothing: products wait for weights.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

# Up to here every multiple of the step is a size, and above it every second one.
FINE_STEP, FINE_LIMIT = 8, 256
SMALLEST = (1, 2, 4)
# Nothing larger: such steps keep a GPU busy by themselves.
MOST_ROWS = 512
# Of the sizes recorded before the first request comes, each is so many times the next smaller one.
FIRST_RATIO = 4


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ..., and what `max_num_seqs` is, ascending."""
    most = min(max_num_seqs, MOST_ROWS)
    fine = range(FINE_STEP, FINE_LIMIT, FINE_STEP)
    coarse = range(FINE_LIMIT, MOST_ROWS + 1, 2 * FINE_STEP)
    return tuple(sorted({most, *(size for size in (*SMALLEST, *fine, *coarse) if size <= most)}))


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ..., and `most` itself, ascending."""
    return tuple(sorted({most, *(1 << power for power in range(most.bit_length()))}))


def within(sizes: Iterable[int], max_num_seqs: int) -> tuple[int, ...]:
    """Sizes that a user named, ascending, without those that no step can fill; the largest is kept to what
    there can be."""
    wanted = sorted(set(sizes))
    kept = [size for size in wanted if size < max_num_seqs]
    if wanted and wanted[-1] >= max_num_seqs:
        kept.append(max_num_seqs)
    return tuple(kept)


def first_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those to record at the start, the largest first: it makes the memory that the others share."""
    first: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not first or size * FIRST_RATIO <= first[-1]:
            first.append(size)
    if sizes and first[-1] != min(sizes):
        first.append(min(sizes))
    return tuple(first)


def smallest_that_holds(sizes: Sequence[int], num_rows: int) -> int | None:
    """sizes: ascending."""
    place = bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None

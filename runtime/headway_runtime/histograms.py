"""Distributions and rates, counted in constant time and constant memory. Knows no metric's name.

Times fall into 105 buckets from 1 ms to two minutes, each at most 15% wider than the one before, so that a
percentile read from them is that exact; sizes (tokens, sequences) into powers of two.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

FIRST_EDGE_MILLISECONDS = 1.0
EDGE_RATIO = 1.12
NUM_EDGES = 105
# Bucket i counts values <= EDGES_MILLISECONDS[i]; one more bucket, index NUM_EDGES, lies above all edges.
EDGES_MILLISECONDS = tuple(FIRST_EDGE_MILLISECONDS * EDGE_RATIO**i for i in range(NUM_EDGES))
assert all(high <= low * 1.15 for low, high in pairwise(EDGES_MILLISECONDS))
SIZE_EDGES = tuple(2**i for i in range(18))

RATE_WINDOW_SECONDS = 10


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts per bucket (NUM_EDGES + 1 of them) and the sum of all values in milliseconds."""

    counts: tuple[int, ...]
    sum_milliseconds: float


@dataclass(frozen=True, slots=True)
class SizeSnapshot:
    """Counts per bucket (one more than SIZE_EDGES) and the sum of all values."""

    counts: tuple[int, ...]
    sum: int


class Histogram:
    """Counts of times in the fixed buckets."""

    __slots__ = ("_counts", "_sum_milliseconds")

    def __init__(self) -> None:
        self._counts = [0] * (NUM_EDGES + 1)
        self._sum_milliseconds = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` values of `seconds` each; a clock's negative rounding counts as 0."""
        milliseconds = max(0.0, seconds * 1000.0)
        self._counts[bisect_left(EDGES_MILLISECONDS, milliseconds)] += count
        self._sum_milliseconds += milliseconds * count

    def observe_each(self, values: Iterable[float], count: int = 1) -> None:
        """`observe` each of these; of many it takes half the time."""
        counts, total = self._counts, self._sum_milliseconds
        for seconds in values:
            milliseconds = max(0.0, seconds * 1000.0)
            counts[bisect_left(EDGES_MILLISECONDS, milliseconds)] += count
            total += milliseconds * count
        self._sum_milliseconds = total

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(tuple(self._counts), self._sum_milliseconds)


class SizeHistogram:
    """Counts of whole numbers in powers of two."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(SIZE_EDGES) + 1)
        self._sum = 0

    def observe(self, size: int, count: int = 1) -> None:
        self._counts[bisect_left(SIZE_EDGES, size)] += count
        self._sum += size * count

    def snapshot(self) -> SizeSnapshot:
        return SizeSnapshot(tuple(self._counts), self._sum)


class RateWindow:
    """How much came per second, over the last whole `RATE_WINDOW_SECONDS` seconds.

    The second that is still running is left out: a rate must not dip each time a new one begins.
    """

    __slots__ = ("_amounts", "_clock", "_second")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = int(clock())
        # One slot per whole second, and one for the running one.
        self._amounts = [0] * (RATE_WINDOW_SECONDS + 1)

    def add(self, amount: int) -> None:
        self._amounts[self._advance()] += amount

    def per_second(self) -> float:
        running = self._advance()
        return (sum(self._amounts) - self._amounts[running]) / RATE_WINDOW_SECONDS

    def _advance(self) -> int:
        """Forget what is too old; the slot of the running second."""
        now = int(self._clock())
        num_slots = len(self._amounts)
        for second in range(max(self._second + 1, now - num_slots + 1), now + 1):
            self._amounts[second % num_slots] = 0
        self._second = max(self._second, now)
        return self._second % num_slots

"""Latency histograms: counts on one grid, their sums, and percentiles interpolated in the sum.

The grid is the one replicas use today (edge i = 1 ms * 1.12**i, bucket 105 above all edges). Counts that
come with other edges are put where their upper edge lies, so that a mixed fleet can still be summed.
Percentiles of replicas are never averaged.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf, sqrt

from headway_operator.samples import LATENCY_EDGES

EDGES = LATENCY_EDGES
# Edges travel as a formula over floats: the same edge may differ in its last digits.
_TOLERANCE = 1.0 - 1e-9

NUM_BUCKETS = len(EDGES) + 1

# Sparse, by bucket.
Counts = Mapping[int, int]
# Of all buckets; () where they are not known.
Dense = tuple[int, ...]


def bucket_of(milliseconds: float) -> int:
    """The bucket that counts a value: the first whose edge is not below it."""
    return bisect_left(EDGES, milliseconds * _TOLERANCE)


def on_grid(edges: tuple[float, ...], counts: Dense) -> Dense:
    """Counts on our grid of counts between other edges (one more count than edges)."""
    places = None if edges is EDGES else _places(edges)
    if places is None:
        return counts
    result = [0] * NUM_BUCKETS
    for bucket, count in zip(places, counts, strict=True):
        result[bucket] += count
    return tuple(result)


@lru_cache(maxsize=16)
def _places(edges: tuple[float, ...]) -> tuple[int, ...] | None:
    """The bucket of our grid for each bucket between these edges; None where they are the same."""
    places = tuple(bucket_of(edge) for edge in (*edges, inf))
    return None if places == tuple(range(NUM_BUCKETS)) else places


def total(many: Iterable[Counts]) -> dict[int, int]:
    """The sum of several histograms."""
    result: defaultdict[int, int] = defaultdict(int)
    for counts in many:
        for bucket, count in counts.items():
            result[bucket] += count
    return dict(result)


def mean_and_deviation(counts: Counts) -> tuple[float, float]:
    """In milliseconds, each count in the middle of its bucket, by ratios; (0, 0) without any."""
    half = sqrt(EDGES[1] / EDGES[0])
    middles = [(EDGES[min(bucket, len(EDGES) - 1)] / half, count) for bucket, count in counts.items()]
    num = max(1, sum(counts.values()))
    mean = sum(middle * count for middle, count in middles) / num
    return mean, sqrt(sum((middle - mean) ** 2 * count for middle, count in middles) / num)


def percentile(counts: Counts, percent: float) -> float | None:
    """The value, in milliseconds, below which `percent` of the counts lie; None without any.

    Linear inside the bucket that holds it; in the one above all edges, the last edge.
    """
    num = sum(counts.values())
    if num == 0:
        return None
    rank = num * percent / 100.0
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            if bucket >= len(EDGES):
                return EDGES[-1]
            low = EDGES[bucket - 1] if bucket else 0.0
            inside = (rank - (seen - counts[bucket])) / counts[bucket]
            return low + (EDGES[bucket] - low) * inside
    raise AssertionError("the last bucket holds the last rank")

"""Summed latency histograms: sparse counts on one grid, and percentiles interpolated in the sum.

The grid is the one replicas use today (edge i = 1 ms * 1.12**i, bucket 105 above all edges). Counts that
come with other edges are put where their upper edge lies, so that a mixed fleet can still be summed.
Percentiles of replicas are never averaged.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import inf

EDGES = tuple(1.0 * 1.12**i for i in range(105))
# Edges travel as a formula over floats: the same edge may differ in its last digits.
_TOLERANCE = 1.0 - 1e-9

Counts = Mapping[int, int]


def bucket_of(milliseconds: float) -> int:
    """The bucket that counts a value: the first whose edge is not below it."""
    return bisect_left(EDGES, milliseconds * _TOLERANCE)


def on_grid(edges: tuple[float, ...], counts: tuple[int, ...]) -> dict[int, int]:
    """Sparse counts on our grid of counts between other edges (one more count than edges)."""
    result: dict[int, int] = {}
    for edge, count in zip((*edges, inf), counts, strict=True):
        if count:
            bucket = bucket_of(edge)
            result[bucket] = result.get(bucket, 0) + count
    return result


def total(many: Iterable[Counts]) -> dict[int, int]:
    """The sum of several histograms."""
    result: dict[int, int] = {}
    for counts in many:
        for bucket, count in counts.items():
            result[bucket] = result.get(bucket, 0) + count
    return result


def increments(now: Counts, before: Counts) -> dict[int, int]:
    """What came on top of `before`; all of `now` when a count went back, which means that it began anew."""
    if any(now.get(bucket, 0) < count for bucket, count in before.items()):
        return dict(now)
    grown = {bucket: count - before.get(bucket, 0) for bucket, count in now.items()}
    return {bucket: count for bucket, count in grown.items() if count}


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

"""Summed latency histograms: sparse counts on one grid, and percentiles interpolated in the sum.

The grid is the one replicas use today (edge i = 1 ms * 1.12**i, bucket 105 above all edges). Counts that
come with other edges are put where their upper edge lies, so that a mixed fleet can still be summed.
Percentiles of replicas are never averaged.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
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
    places = _places(edges)
    if places is None:
        return {bucket: count for bucket, count in enumerate(counts) if count}
    result: dict[int, int] = {}
    for bucket, count in zip(places, counts, strict=True):
        if count:
            result[bucket] = result.get(bucket, 0) + count
    return result


@lru_cache(maxsize=16)
def _places(edges: tuple[float, ...]) -> tuple[int, ...] | None:
    """The bucket of our grid for each bucket between these edges; None where they are the same."""
    places = tuple(bucket_of(edge) for edge in (*edges, inf))
    return None if places == tuple(range(len(EDGES) + 1)) else places


def total(many: Iterable[Counts]) -> dict[int, int]:
    """The sum of several histograms."""
    result: dict[int, int] = {}
    for counts in many:
        for bucket, count in counts.items():
            result[bucket] = result.get(bucket, 0) + count
    return result


def increments(now: Counts, before: Counts) -> dict[int, int]:
    """What came on top of `before`; all of `now` when a count went back, which means that it began anew."""
    if now == before:
        return {}
    grown: dict[int, int] = {}
    for bucket, count in now.items():
        more = count - before.get(bucket, 0)
        if more < 0:
            return dict(now)
        if more:
            grown[bucket] = more
    if len(before) > len(now) or not before.keys() <= now.keys():
        return dict(now)
    return grown


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

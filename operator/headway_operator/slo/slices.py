"""What was counted in a few seconds, packed: an operator keeps sixty of these for each of its services.

Totals lie in an array beside the place of each name, which slices with the same names share; counts of a
latency in an array from its first bucket to its last, as minutes of them are added up in each pass.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Any

from headway_operator.slo import histogram
from headway_operator.slo.baselines import JUDGED, LATENCIES

Numbers = Mapping[str, float]

NOTHING: Numbers = {}
NO_COUNTS: histogram.Counts = {}
_NONE_COUNTED = array("q")
_NO_ROW = (0, _NONE_COUNTED)
_NO_LATENCIES = (_NO_ROW,) * len(LATENCIES)
# The first bucket, and the counts from there on.
Row = tuple[int, "array[int]"]


class Slice:
    """What all replicas and gateways together counted in (start, end]; never changed once it is made.

    totals: by name; what is not there is 0. counts: by latency and bucket, of LATENCIES alone. places: of
    names in `values`, one object for the same names.
    """

    __slots__ = ("_counts", "end", "places", "start", "values")

    def __init__(
        self,
        start: float,
        end: float,
        totals: Numbers | None = None,
        counts: Mapping[str, histogram.Counts] | None = None,
    ) -> None:
        self.start = start
        self.end = end
        totals = totals or {}
        self.places = _places_of(tuple(totals))
        self.values = array("d", totals.values())
        packed = tuple(_packed((counts or {}).get(name)) for name in LATENCIES) if counts else _NO_LATENCIES
        self._counts: tuple[Row, ...] = packed

    @property
    def totals(self) -> dict[str, float]:
        return dict(zip(self.places, self.values, strict=True))

    @property
    def counts(self) -> dict[str, histogram.Counts]:
        """Of the latencies of which something was counted."""
        return {
            name: _unpacked(row)
            for name, row in zip(LATENCIES, self._counts, strict=True)
            if row is not _NO_ROW
        }

    def total(self, name: str) -> float:
        """One of the totals."""
        place = self.places.get(name)
        return 0.0 if place is None else self.values[place]

    def row_of(self, name: str) -> Row:
        """The counts of a latency."""
        return self._counts[LATENCIES.index(name)]

    def with_totals(self, totals: Numbers) -> "Slice":
        """The same but for these."""
        return Slice(self.start, self.end, totals, self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash((self.start, self.end))

    def __repr__(self) -> str:
        return f"Slice({self.start!r}, {self.end!r}, {self.totals!r}, {self.counts!r})"

    def _all(self) -> tuple[Any, ...]:
        return self.start, self.end, self.totals, self._counts

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "span": [self.start, self.end],
            "totals": self.totals,
            "counts": {
                name: {str(bucket): count for bucket, count in counts.items()}
                for name, counts in self.counts.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Slice":
        """The reverse of `to_dict`. Raises KeyError, TypeError or ValueError for something else."""
        counts = {
            name: {int(bucket): count for bucket, count in one.items()}
            for name, one in data["counts"].items()
        }
        if any(not 0 <= bucket < histogram.NUM_BUCKETS for one in counts.values() for bucket in one):
            raise ValueError(f"counts of buckets beyond {histogram.NUM_BUCKETS - 1}")
        start, end = data["span"]
        return cls(start, end, data["totals"], counts)


def joined(slices: Iterable[Slice]) -> Slice:
    """Several slices as one."""
    parts = list(slices)
    if not parts:
        return Slice(0.0, 0.0)
    return Slice(
        min(part.start for part in parts),
        max(part.end for part in parts),
        summed_totals(parts),
        {name: counts_in(parts, name) for name in LATENCIES},
    )


def without_exact(one: Slice) -> Slice:
    """The slice without the exact counters, which were taken against targets that no longer hold."""
    judged = {name for pair in JUDGED for name in pair}
    return one.with_totals({name: value for name, value in one.totals.items() if name not in judged})


def summed_totals(slices: Iterable[Slice], before: Numbers = NOTHING) -> dict[str, float]:
    """By name, on top of what was summed before."""
    result = defaultdict(float, before)
    alike: defaultdict[int, list[Slice]] = defaultdict(list)
    for one in slices:
        alike[id(one.places)].append(one)
    for some in alike.values():
        sums = map(sum, zip(*[one.values for one in some], strict=True))
        for name, value in zip(some[0].places, sums, strict=True):
            result[name] += value
    return dict(result)


def counts_in(slices: Iterable[Slice], name: str, before: histogram.Counts = NO_COUNTS) -> dict[int, int]:
    """Of a latency by bucket, on top of what was summed before."""
    rows = [row for one in slices if (row := one.row_of(name)) is not _NO_ROW]
    if not rows:
        return dict(before)
    first, end = min([row[0] for row in rows]), max([row[0] + len(row[1]) for row in rows])
    padded = [
        counts
        if len(counts) == end - first
        else (*repeat(0, at - first), *counts, *repeat(0, end - at - len(counts)))
        for at, counts in rows
    ]
    result = dict(before)
    for bucket, count in enumerate(map(sum, zip(*padded, strict=True)), first):
        if count:
            result[bucket] = result.get(bucket, 0) + count
    return result


@lru_cache(maxsize=4096)
def _places_of(names: tuple[str, ...]) -> Mapping[str, int]:
    """The same object for the same names."""
    return {name: place for place, name in enumerate(names)}


def _packed(counts: histogram.Counts | None) -> Row:
    if not counts:
        return _NO_ROW
    first, last = min(counts), max(counts)
    return first, array("q", [counts.get(bucket, 0) for bucket in range(first, last + 1)])


def _unpacked(row: Row) -> dict[int, int]:
    first, counts = row
    return {bucket: count for bucket, count in enumerate(counts, first) if count}

"""What was counted in a few seconds, packed: an operator keeps sixty of these for each of its services.

Totals lie in an array beside the place of each name, which slices with the same names share; counts of a
latency in an array of (bucket, count) pairs.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from headway_operator.slo import histogram
from headway_operator.slo.baselines import JUDGED, LATENCIES

Numbers = Mapping[str, float]

_NOTHING = array("i")
_NO_COUNTS = (_NOTHING,) * len(LATENCIES)


class Slice:
    """What all replicas and gateways together counted in (start, end]; never changed once it is made.

    totals: by name; what is not there is 0. counts: by latency and bucket, of LATENCIES alone.
    """

    __slots__ = ("_counts", "_places", "_values", "end", "start")

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
        self._places = _places_of(tuple(totals))
        self._values = array("d", totals.values())
        packed = tuple(_packed((counts or {}).get(name)) for name in LATENCIES)
        self._counts = packed if any(packed) else _NO_COUNTS

    @property
    def totals(self) -> dict[str, float]:
        return dict(zip(self._places, self._values, strict=True))

    @property
    def counts(self) -> dict[str, histogram.Counts]:
        """Of the latencies of which something was counted."""
        return {name: _unpacked(one) for name, one in zip(LATENCIES, self._counts, strict=True) if len(one)}

    def total(self, name: str) -> float:
        """One of the totals."""
        place = self._places.get(name)
        return 0.0 if place is None else self._values[place]

    def counts_of(self, name: str) -> histogram.Counts:
        """By bucket, of a latency."""
        return _unpacked(self._counts[LATENCIES.index(name)])

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
        summed_totals(part.totals for part in parts),
        {name: histogram.total(part.counts_of(name) for part in parts) for name in LATENCIES},
    )


def without_exact(one: Slice) -> Slice:
    """The slice without the exact counters, which were taken against targets that no longer hold."""
    judged = {name for pair in JUDGED for name in pair}
    return one.with_totals({name: value for name, value in one.totals.items() if name not in judged})


def summed_totals(many: Iterable[Numbers]) -> dict[str, float]:
    """By name."""
    result: defaultdict[str, float] = defaultdict(float)
    for numbers in many:
        for name, value in numbers.items():
            result[name] += value
    return dict(result)


@lru_cache(maxsize=4096)
def _places_of(names: tuple[str, ...]) -> Mapping[str, int]:
    """The same object for the same names."""
    return {name: place for place, name in enumerate(names)}


def _packed(counts: histogram.Counts | None) -> "array[int]":
    return array("i", [number for pair in counts.items() for number in pair]) if counts else _NOTHING


def _unpacked(packed: "array[int]") -> dict[int, int]:
    return dict(zip(packed[::2], packed[1::2], strict=True))

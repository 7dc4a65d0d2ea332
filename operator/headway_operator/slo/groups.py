"""How many requests come with one, from pass to pass: the index of dispersion over some seconds.

Requests that come together wait for each other. How many do shows in how much the counts of passes differ:
by the index times as much as by chance. It is of second differences, so that no slope counts, and of the
shortest time that there is, the few seconds of a pass: over a longer one a rate that goes up and down is
taken for groups, and a step counts for more. The first passes count as a mean, with FIRST_PASSES of arrivals
by chance; later ones fade within MEMORY_SECONDS. One tells at most MOST_SURPRISE times what was known before.

Kept apart from the dispersion of `forecast`, which is of what comes while a replica starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway_operator.slo.rate_change import Span

MEMORY_SECONDS = 300.0
FIRST_PASSES = 15
MOST_SURPRISE = 12.0
MOST_INDEX = 100.0
# Three passes of which one is longer than another by more than this are not compared.
MOST_UNEVEN = 1.5
# Fewer requests in a pass tell nothing.
LEAST_COUNT = 1.0


@dataclass(frozen=True, slots=True)
class Groups:
    """index: variance over mean of a pass's count; 1 is chance. at: the end of the last pass that was seen.
    number: of passes that were counted, as far as it matters."""

    index: float = 1.0
    at: float = 0.0
    number: int = 0

    def seeing(self, spans: Sequence[Span]) -> "Groups":
        """After one more pass. spans: of arrivals, the last of which ends now."""
        if len(spans) < 3 or spans[-1].end <= self.at:
            return self
        last, seen = spans[-3:], replace(self, at=spans[-1].end)
        lengths = [one.end - one.start for one in last]
        if min(lengths) <= 0.0 or max(lengths) > MOST_UNEVEN * min(lengths):
            return seen
        seconds = sum(lengths) / 3.0
        first, second, third = (
            one.count * seconds / length for one, length in zip(last, lengths, strict=True)
        )
        mean = (first + second + third) / 3.0
        if mean < LEAST_COUNT or (not self.number and not first):
            return seen  # before the first request there was no load
        # A second difference has six times the variance of one.
        told = (first - 2.0 * second + third) ** 2 / 6.0 / mean
        told = min(MOST_INDEX, MOST_SURPRISE * self.index, told)
        least = min(1.0, seconds / MEMORY_SECONDS)
        weight = max(least, 1.0 / (FIRST_PASSES + 1 + self.number))
        index = max(1.0, self.index + weight * (told - self.index))
        return replace(seen, index=index, number=min(self.number + 1, int(MEMORY_SECONDS)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"index": self.index, "at": self.at, "number": self.number}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Groups":
        """The reverse of `to_dict`. Raises KeyError, TypeError and ValueError for anything else."""
        found = cls(float(data["index"]), float(data["at"]), int(data["number"]))
        if not 1.0 <= found.index <= MOST_INDEX or found.number < 0:
            raise ValueError(f"groups are {dict(data)}; index is 1 to {MOST_INDEX:g}, number 0 at least")
        return found

"""How far what the rate does lately is still so when replicas asked for because of it are ready.

A burst that is over before a replica can start is none that replicas help against; they would come when it
has gone, and be held for as long as removal looks back. Whether a service's load has such bursts shows in
what came of its forecasts. Each BIN_SECONDS it is noted what was foretold for when, and the mean rate of the
last minutes; when that time has come, how much of the difference between the two was there:

    share = (PRIOR + sum of d * came) / (PRIOR + sum of d * d),   d = foretold / mean - 1, came = rate / mean - 1

which is least squares, shrunk to 1: what nobody has seen pass is taken to stay. What noise makes of a level is
not counted, or a steady load would teach that nothing lasts. Half of what was learnt is forgotten in
HALF_LIFE_SECONDS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway_operator.slo.rate_change import Span, rate_within

BIN_SECONDS = 15.0
PRIOR = 0.1
HALF_LIFE_SECONDS = 1800.0
# A difference of so many standard deviations of the mean rate over so many seconds is none that noise makes.
LEAST_DEVIATIONS, NOISE_SECONDS = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class Persistence:
    """differed: the sum of d * d. stayed: of d * came. foretold: (for when, the mean then, requests per second),
    of what is still to come, the earliest first."""

    differed: float = 0.0
    stayed: float = 0.0
    foretold: tuple[tuple[float, float, float], ...] = ()

    @property
    def share(self) -> float:
        """From 0, nothing stays, to 1."""
        return max(0.0, min(1.0, (PRIOR + self.stayed) / (PRIOR + self.differed)))

    def foretelling(self, due: float, mean: float, rate: float, idc: float) -> "Persistence":
        """With one more forecast. Of a time that was spoken of before, the first word holds."""
        latest = self.foretold[-1][0] if self.foretold else 0.0
        noise = LEAST_DEVIATIONS**2 * idc / NOISE_SECONDS * mean
        if due - latest < BIN_SECONDS or mean <= 0.0 or (rate - mean) ** 2 < noise:
            return self
        return replace(self, foretold=(*self.foretold, (due, mean, rate)))

    def seeing(self, spans: Sequence[Span], now: float) -> "Persistence":
        """With what has come of all that was foretold for a time that is over."""
        found = self
        while found.foretold and found.foretold[0][0] + BIN_SECONDS <= now:
            due, mean, rate = found.foretold[0]
            found = replace(found, foretold=found.foretold[1:])
            came = rate_within(spans, due - BIN_SECONDS, due + BIN_SECONDS)
            if came is not None:
                differed, seen = rate / mean - 1.0, came / mean - 1.0
                kept = 0.5 ** (BIN_SECONDS / HALF_LIFE_SECONDS)
                found = replace(
                    found,
                    differed=kept * found.differed + differed**2,
                    stayed=kept * found.stayed + differed * seen,
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "differed": self.differed,
            "stayed": self.stayed,
            "foretold": [list(one) for one in self.foretold],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Persistence":
        """The reverse of `to_dict`."""
        foretold = tuple((due, mean, rate) for due, mean, rate in data["foretold"])
        return cls(data["differed"], data["stayed"], foretold)

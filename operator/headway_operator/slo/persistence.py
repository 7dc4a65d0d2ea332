"""How far a rate above the mean is still above it when replicas asked for because of it are ready.

A burst that is over before a replica can start is none that replicas help against; they would come when it
has gone, and be held for as long as removal looks back. Whether a service's load has such bursts shows in
what came of its forecasts. Each BIN_SECONDS it is noted what was foretold for when, and the mean rate of the
last minutes; when that time has come, how much of the difference between the two was there. The mean of that
over all such times, with PRIOR in which all of it was, is the share that a difference is believed to leave:

    share = (PRIOR + sum of (came - mean) / (foretold - mean)) / (PRIOR + number)

Rates below the mean are believed: how long a replica is kept is for removal to say. What noise makes of a
level is not counted, and what is not believed is no more than SIZES times as large as differences were that
this was learnt from: small bursts say nothing of a step. Half of what was learnt is forgotten in
HALF_LIFE_SECONDS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from headway_operator.slo.rate_change import Span, rate_within

BIN_SECONDS = 15.0
PRIOR = 1.0
LEAST_KEPT, MOST_KEPT = -1.0, 2.0
SIZES = 1.5
HALF_LIFE_SECONDS = 1800.0
# A difference of so many standard deviations of the mean rate over so many seconds is none that noise makes.
LEAST_DEVIATIONS, NOISE_SECONDS = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class Persistence:
    """number: of times that were seen. kept: the sum of the shares left. squares: of differences, as shares
    of the mean. foretold: (for when, the mean then, requests per second), of what is still to come, the
    earliest first."""

    number: float = 0.0
    kept: float = 0.0
    squares: float = 0.0
    foretold: tuple[tuple[float, float, float], ...] = ()

    @property
    def share(self) -> float:
        """Of a difference, that is taken to last: from 0, nothing, to 1."""
        return max(0.0, min(1.0, (PRIOR + self.kept) / (PRIOR + self.number)))

    def lasting(self, mean: float, rate: float) -> float:
        """Of a rate that is foretold, what is believed."""
        if not self.number or rate <= mean:
            return rate
        most = SIZES * sqrt(self.squares / self.number) * mean
        return rate - (1.0 - self.share) * min(most, rate - mean)

    def foretelling(self, due: float, mean: float, rate: float, idc: float) -> "Persistence":
        """With one more forecast, if it is above the mean; of times closer together the first alone."""
        latest = self.foretold[-1][0] if self.foretold else 0.0
        noise = LEAST_DEVIATIONS**2 * idc / NOISE_SECONDS * mean
        if due - latest < BIN_SECONDS or mean <= 0.0 or rate <= mean or (rate - mean) ** 2 < noise:
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
                before = 0.5 ** (BIN_SECONDS / HALF_LIFE_SECONDS)
                kept = max(LEAST_KEPT, min(MOST_KEPT, (came - mean) / (rate - mean)))
                found = replace(
                    found,
                    number=before * found.number + 1.0,
                    kept=before * found.kept + kept,
                    squares=before * found.squares + (rate / mean - 1.0) ** 2,
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        foretold = [list(one) for one in self.foretold]
        return {"number": self.number, "kept": self.kept, "squares": self.squares, "foretold": foretold}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Persistence":
        """The reverse of `to_dict`."""
        foretold = tuple((due, mean, rate) for due, mean, rate in data["foretold"])
        return cls(data["number"], data["kept"], data["squares"], foretold)

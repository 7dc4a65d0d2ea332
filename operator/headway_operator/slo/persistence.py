"""How far a rate above the mean is still above it when replicas asked for because of it are ready.

A burst that is over before a replica can start is none that replicas help against; they would come when it
has gone, and be held for as long as removal looks back. Whether a service's load has such bursts shows in
what came of its forecasts. Each BIN_SECONDS it is noted what was foretold for when, and the mean rate of the
last minutes; when that time has come, how much of the difference between the two was there. The mean of that
over all such times, with PRIOR in which all of it was, is the share that a difference is believed to leave:

    share = (PRIOR + sum of (came - mean) / (foretold - mean)) / (PRIOR + number)

Each term is held within KEPT, so that no single one outweighs all others, and the share within 0 and 1. Rates
below the mean are believed: how long a replica is kept is for removal to say. What noise makes of a level is
not counted. Of a larger difference than MOST_DOUBTED times what those were that this was learnt from, the
rest is believed: small bursts say nothing of a step. Half of what was learnt is forgotten in
HALF_LIFE_SECONDS, whatever comes meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

from headway_operator.slo.rate_change import Span, rate_within

BIN_SECONDS = 15.0
PRIOR = 1.0
# Shares that are left of a difference: gone and as much below the mean, to twice as much above it.
KEPT = (-1.0, 2.0)
MOST_DOUBTED = 1.5
HALF_LIFE_SECONDS = 1800.0
# A difference of so many standard deviations of the mean rate over so many seconds is none that noise makes.
LEAST_DEVIATIONS, NOISE_SECONDS = 3.0, 60.0
# What is foretold for later than this is not noted: who waits for a node for a day says nothing of bursts.
MOST_AHEAD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Persistence:
    """number: of times that were seen. kept: the sum of the shares left. squares: of differences, as shares
    of the mean. faded_at: until when forgetting is counted in. foretold: (for when, the mean then, requests
    per second), of what is still to come, the earliest first."""

    number: float = 0.0
    kept: float = 0.0
    squares: float = 0.0
    faded_at: float = 0.0
    foretold: tuple[tuple[float, float, float], ...] = ()

    @property
    def share(self) -> float:
        """Of a difference, that is taken to last: from 0, nothing, to 1."""
        return max(0.0, min(1.0, (PRIOR + self.kept) / (PRIOR + self.number)))

    def lasting(self, mean: float, rate: float) -> float:
        """Of a rate that is foretold, what is believed."""
        if not self.number or rate <= mean:
            return rate
        most = MOST_DOUBTED * sqrt(self.squares / self.number) * mean
        return rate - (1.0 - self.share) * min(most, rate - mean)

    def foretelling(self, now: float, due: float, mean: float, rate: float, idc: float) -> "Persistence":
        """With one more forecast, if it is above the mean. What was foretold for later than this one, when
        replicas took longer to be ready, is dropped."""
        noise = LEAST_DEVIATIONS**2 * idc / NOISE_SECONDS * mean
        if mean <= 0.0 or rate <= mean or (rate - mean) ** 2 < noise or due - now > MOST_AHEAD_SECONDS:
            return self
        earlier = tuple(one for one in self.foretold if one[0] < due)
        return replace(self, foretold=(*earlier, (due, mean, rate)))

    def seeing(self, spans: Sequence[Span], now: float) -> "Persistence":
        """With what has come of all that was foretold for a time that is over."""
        found = self._faded(now)
        while found.foretold and found.foretold[0][0] + BIN_SECONDS <= now:
            due, mean, rate = found.foretold[0]
            found = replace(found, foretold=found.foretold[1:])
            came = rate_within(spans, due - BIN_SECONDS, due + BIN_SECONDS)
            if came is not None:
                kept = max(KEPT[0], min(KEPT[1], (came - mean) / (rate - mean)))
                found = replace(
                    found,
                    number=found.number + 1.0,
                    kept=found.kept + kept,
                    squares=found.squares + (rate / mean - 1.0) ** 2,
                )
        return found

    def _faded(self, now: float) -> "Persistence":
        seconds = now - self.faded_at
        if not self.number or seconds < BIN_SECONDS:
            return self if self.number else replace(self, faded_at=now)
        left = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        return replace(
            self,
            number=left * self.number,
            kept=left * self.kept,
            squares=left * self.squares,
            faded_at=now,
        )

    def set_back(self, now: float) -> "Persistence":
        """With a clock that says an earlier time: what was learnt stays, what was foretold is forgotten."""
        return replace(self, faded_at=min(self.faded_at, now), foretold=())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "number": self.number,
            "kept": self.kept,
            "squares": self.squares,
            "faded_at": self.faded_at,
            "foretold": [list(one) for one in self.foretold],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Persistence":
        """The reverse of `to_dict`. Raises KeyError, TypeError or ValueError for one that was damaged."""
        foretold = tuple((float(due), float(mean), float(rate)) for due, mean, rate in data["foretold"])
        number, kept, squares, faded_at = (
            float(data[name]) for name in ("number", "kept", "squares", "faded_at")
        )
        numbers = (number, kept, squares, faded_at, *(one for each in foretold for one in each))
        if not all(map(isfinite, numbers)) or min(number, squares) < 0.0:
            raise ValueError(f"number={number!r}, kept={kept!r}, squares={squares!r} is no persistence")
        if not all(0.0 < mean < rate for _, mean, rate in foretold):
            raise ValueError(f"foretold={data['foretold']!r:.100}: a rate is not above its mean")
        return cls(number, kept, squares, faded_at, foretold)

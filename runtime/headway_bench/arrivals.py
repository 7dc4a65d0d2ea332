"""When requests are due in an open loop: a renewal process of unit rate, stretched by a rate that may change.

Gaps of mean 1 are drawn (constant, exponential, or gamma with vLLM's `burstiness` as its shape: 1 is Poisson,
below 1 comes in bursts, the coefficient of variation is 1/sqrt(burstiness)), summed, and carried to the clock
by the inverse of the cumulated rate. So a ramp or a trace of rates changes how often requests come and not
what kind of process they are (time rescaling; Brown et al. 2002, Neural Computation 14:325).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

ArrivalKind = Literal["poisson", "gamma", "constant"]


@dataclass(frozen=True, slots=True)
class RateSegment:
    """From `start_seconds` to `end_seconds` the rate goes linearly from one value to another, in 1/s.

    `burstiness` is the gamma shape within it; None leaves it to the process.
    """

    start_seconds: float
    end_seconds: float
    rate_at_start: float
    rate_at_end: float
    burstiness: float | None = None

    @property
    def expected_arrivals(self) -> float:
        """The rate's integral over the segment."""
        length = self.end_seconds - self.start_seconds
        if math.isinf(length):
            return math.inf if self.rate_at_end > 0 else 0.0
        return length * (self.rate_at_start + self.rate_at_end) / 2

    def time_of(self, cumulated: float) -> float:
        """When the rate's integral since the segment's start reaches `cumulated`."""
        if cumulated == 0:
            return self.start_seconds
        length = self.end_seconds - self.start_seconds
        slope = 0.0 if math.isinf(length) else (self.rate_at_end - self.rate_at_start) / length
        if slope == 0:
            return self.start_seconds + cumulated / self.rate_at_start
        # The root of slope/2 t^2 + rate t = cumulated, in the form that loses no digits for small slopes.
        root = math.sqrt(max(0.0, self.rate_at_start**2 + 2 * slope * cumulated))
        return self.start_seconds + 2 * cumulated / (self.rate_at_start + root)


def steady(rate: float, ramp_seconds: float = 0.0) -> tuple[RateSegment, ...]:
    """One rate for ever, reached in a straight line from 0 over `ramp_seconds`."""
    ramp = (RateSegment(0.0, ramp_seconds, 0.0, rate),) if ramp_seconds > 0 else ()
    return (*ramp, RateSegment(ramp_seconds, math.inf, rate, rate))


def arrival_times(
    segments: Sequence[RateSegment],
    kind: ArrivalKind,
    burstiness: float,
    random: numpy.random.Generator,
) -> Iterator[float]:
    """Seconds from the start of the load, never falling; ends with the last segment.

    An infinite rate makes every request due at once, at the segment's start.
    """
    gap = 0.0 if kind == "constant" else None
    for segment in segments:
        if math.isinf(segment.rate_at_start):
            while True:
                yield segment.start_seconds
        shape = segment.burstiness if segment.burstiness is not None else burstiness
        cumulated, whole = 0.0, segment.expected_arrivals
        while True:
            gap = _unit_gap(kind, shape, random) if gap is None else gap
            if cumulated + gap >= whole:
                gap -= whole - cumulated
                break
            cumulated += gap
            gap = None
            yield segment.time_of(cumulated)


def _unit_gap(kind: ArrivalKind, burstiness: float, random: numpy.random.Generator) -> float:
    if kind == "constant":
        return 1.0
    if kind == "poisson":
        return float(random.standard_exponential())
    return float(random.standard_gamma(burstiness)) / burstiness

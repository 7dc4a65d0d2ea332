"""How the rate of requests has changed in the last minutes: not at all, by a step, or along a line since.

Each end of a slice is a time at which something may have begun: a step to another rate, or a rise (or fall)
that has gone on since. Both are fitted to the counts by least squares, a count's variance being the index of
dispersion times its mean, and the one that leaves least unexplained is taken for what happened: a step
is no slope then. What it explains, in squared standard deviations, must be more than chance
would: many times are tried, and the less time has passed since, the more often something looks like a
beginning, and the more a burst does. Of what is beyond that bound so much is believed as remains: none of a
change at the bound, nearly all of one that is plain (the non-negative garrote: Breiman, Better Subset
Regression Using the Nonnegative Garrote, 1995).
"""

from collections.abc import Sequence
from dataclasses import dataclass

# What began so many seconds ago must explain so many variances; what began later is not looked at.
LEAST_EXPLAINED = ((40.0, 9.0), (20.0, 16.0), (10.0, 25.0))
# Slices differ in length by what a pass was late.
SLACK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """So many requests came in (start, end]."""

    start: float
    end: float
    count: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Requests per second at the end of the time, and by how many these grow each second from there."""

    level: float
    slope: float = 0.0


def trend(spans: Sequence[Span], idc: float) -> Trend:
    """What happened in these spans, of which the last one ends now; at least one, in order."""
    whole = sum(one.end - one.start for one in spans)
    if whole <= 0.0:
        return Trend(0.0)
    now, mean = spans[-1].end, sum(one.count for one in spans) / whole
    found, most = Trend(mean), 0.0
    # Sums over what is behind the time that is tried: of seconds, requests, and both by seconds before now.
    width = count = w_t = w_tt = c_t = 0.0
    for one in reversed(spans):
        middle, seconds = now - (one.start + one.end) / 2.0, one.end - one.start
        width, count = width + seconds, count + one.count
        w_t, c_t = w_t + seconds * middle, c_t + one.count * middle
        w_tt += seconds * middle**2
        since = now - one.start
        bound = _bound(since)
        if bound is None or mean <= 0.0:
            continue
        variance = idc * mean
        if width < whole:
            jump = count / width - (mean * whole - count) / (whole - width)
            explained = jump**2 * width * (whole - width) / whole / variance
            if explained - bound > most:
                most = explained - bound
                found = Trend(mean + (1.0 - bound / explained) * (count / width - mean))
        # A line that has risen for z = since - middle seconds.
        z, zz, cz = since * width - w_t, since**2 * width - 2.0 * since * w_t + w_tt, since * count - c_t
        spread, along = zz - z**2 / whole, cz - mean * z
        if spread <= 0.0:
            continue
        explained = along**2 / spread / variance
        if explained - bound > most:
            most, slope = explained - bound, along / spread
            believed = 1.0 - bound / explained
            found = Trend(mean + believed * slope * (since - z / whole), believed * slope)
    return found


def _bound(since: float) -> float | None:
    return next((bound for seconds, bound in LEAST_EXPLAINED if since >= seconds - SLACK_SECONDS), None)

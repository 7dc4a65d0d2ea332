"""How the rate of requests has changed in the last minutes: not at all, by a step, or along a line since.

Each end of a slice is a time at which something may have begun: a step to another rate, or a rise (or fall)
that has gone on since. Each is fitted to the counts by least squares, a count's variance being the index of
dispersion times its mean. Which of them happened nobody knows; so what they say is averaged, by how likely
each makes what was counted: exp(explained / 2), explained being in squared standard deviations beyond what
no change explains (Akaike weights: Burnham and Anderson, Model Selection and Multimodel Inference, 2002).
Against each stands a bound, since many times are tried, and since the less time has passed, the more often
a burst looks like a beginning: a line, which is about its end, is held to that of half its time. So noise
is not followed, a step is no slope, and nothing jumps when the balance tips.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp

# What began so many seconds ago must explain so many variances; what began later is not looked at.
LEAST_EXPLAINED = ((40.0, 16.0), (20.0, 20.0), (10.0, 25.0))
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


def rate_within(spans: Sequence[Span], start: float, end: float) -> float | None:
    """Requests per second of those spans whose middle lies in (start, end]; None where they are shorter than
    half of it."""
    kept = [one for one in spans if start < (one.start + one.end) / 2.0 <= end]
    seconds = sum(one.end - one.start for one in kept)
    return sum(one.count for one in kept) / seconds if seconds >= (end - start) / 2.0 else None


def trend(spans: Sequence[Span], idc: float, least_seconds: float = 0.0) -> Trend:
    """What happened in these spans, of which the last one ends now; at least one, in order. least_seconds:
    a step that began less long ago is not looked at, nor a line that did in twice that."""
    whole = sum(one.end - one.start for one in spans)
    if whole <= 0.0:
        return Trend(0.0)
    mean = sum(one.count for one in spans) / whole
    found = [(0.0, mean, 0.0), *(_changes(spans, whole, mean, idc, least_seconds) if mean > 0.0 else ())]
    most = max(gain for gain, _, _ in found)
    weights = [exp((gain - most) / 2.0) for gain, _, _ in found]
    total = sum(weights)
    level = sum(w * one for w, (_, one, _) in zip(weights, found, strict=True)) / total
    slope = sum(w * one for w, (_, _, one) in zip(weights, found, strict=True)) / total
    return Trend(level, slope)


def _changes(
    spans: Sequence[Span], whole: float, mean: float, idc: float, least_seconds: float
) -> Iterator[tuple[float, float, float]]:
    """What each change would explain beyond its bound, with its level now and its slope."""
    now, variance = spans[-1].end, idc * mean
    # Sums over what is behind the time that is tried: of seconds, requests, and both by seconds before now.
    width = count = w_t = w_tt = c_t = 0.0
    for one in reversed(spans):
        middle, seconds = now - (one.start + one.end) / 2.0, one.end - one.start
        width, count = width + seconds, count + one.count
        w_t, c_t = w_t + seconds * middle, c_t + one.count * middle
        w_tt += seconds * middle**2
        since = now - one.start
        bound = _bound(since) if since >= least_seconds - SLACK_SECONDS else None
        line_bound = _bound(since / 2.0) if since >= 2.0 * least_seconds - SLACK_SECONDS else None
        if bound is None:
            continue
        if width < whole:
            jump = count / width - (mean * whole - count) / (whole - width)
            yield jump**2 * width * (whole - width) / whole / variance - bound, count / width, 0.0
        # A line that has risen for z = since - middle seconds.
        z, zz, cz = since * width - w_t, since**2 * width - 2.0 * since * w_t + w_tt, since * count - c_t
        spread, along = zz - z**2 / whole, cz - mean * z
        if spread > 0.0 and line_bound is not None:
            slope = along / spread
            yield along * slope / variance - line_bound, mean + slope * (since - z / whole), slope


def _bound(since: float) -> float | None:
    for seconds, bound in LEAST_EXPLAINED:
        if since >= seconds - SLACK_SECONDS:
            return bound
    return None

"""The rate of requests that replicas asked for now will meet: level, trend, the same time yesterday, bursts.

Arrivals come in slices. The level is the mean of the last two minutes, unless a shorter window's mean is
above it by more than chance explains: so a step is seen within a few passes, and noise is not followed. The
trend is the slope of a straight line through these minutes, so far as chance does not explain it. Yesterday
is a ring of ten-minute means.

How bursty arrivals are is measured: the index of dispersion (IDC), variance over mean of counts in
BIN_SECONDS, from differences of neighbouring bins, so that a trend is not taken for a burst. Poisson has 1;
recorded conversations have 4, code completion 70.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from headway_operator.slo.slices import Slice

LEVEL_SECONDS = 120.0
# By so many standard deviations must a shorter window's mean, or the slope, differ to be believed. Windows
# are many, so that chance would often make one of them stand out at less; and a burst of ten seconds is over
# before a replica for it has started. What is believed is taken for this much less than it looks.
SHORTER_SECONDS = {10.0: 5.0, 20.0: 4.0, 40.0: 3.0, 60.0: 3.0}
BELIEVED_MARGIN, BELIEVED_SLOPE = 1.5, 2.0
# A trend is believed to go on for so much of the level, up or down: a flash crowd ends.
MOST_TREND = 0.25
BIN_SECONDS = 15.0
IDC_WEIGHT = 0.05
LEAST_IDC, MOST_IDC = 1.0, 100.0
DAY_SECONDS = 86_400.0
DAY_BIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Span:
    """So many requests came in (start, end]."""

    start: float
    end: float
    count: float


@dataclass(frozen=True, slots=True)
class Course:
    """What is remembered of the load. idc_at: when a bin was last counted in. day: mean rate by ten minutes
    of the day, with the day (whole days since the epoch) that it was seen on."""

    idc: float = 1.0
    idc_at: float = 0.0
    day: Mapping[int, tuple[int, float]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        day = {str(index): list(seen) for index, seen in (self.day or {}).items()}
        return {"idc": self.idc, "idc_at": self.idc_at, "day": day}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Course":
        """The reverse of `to_dict`."""
        day = {int(index): (int(seen[0]), float(seen[1])) for index, seen in data["day"].items()}
        return cls(data["idc"], data["idc_at"], day or None)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests per second. now: the level; ahead: expected when replicas asked for now are ready."""

    now: float
    ahead: float
    idc: float


def arrivals(slices: Sequence[Slice]) -> list[Span]:
    """What came, without gaps; where somebody did not tell, spread over the time until they did."""
    spans: list[Span] = []
    start, count = None, 0.0
    for one in slices:
        start = one.start if start is None else start
        count += one.total("arrived")
        if not one.total("blind") and one.end > start:
            spans.append(Span(start, one.end, count))
            start, count = None, 0.0
    return spans


def forecast(course: Course, spans: Sequence[Span], now: float, lead_seconds: float) -> Forecast:
    """What to expect `lead_seconds` from now."""
    idc = course.idc
    mean, _ = _rate(spans, now - LEVEL_SECONDS)
    level = mean
    for seconds, deviations in SHORTER_SECONDS.items():
        recent, covered = _rate(spans, now - seconds)
        if covered <= 0.0:
            continue
        chance = sqrt(idc * max(mean, 1.0 / LEVEL_SECONDS) / covered)
        if recent - deviations * chance > mean:
            level = max(level, recent - BELIEVED_MARGIN * chance)
    most = MOST_TREND * level
    ahead = level + max(-most, min(most, _trend(spans, now, mean, idc) * lead_seconds))
    yesterday = _yesterday(course, now + lead_seconds)
    return Forecast(level, max(0.0, ahead, yesterday), idc)


def watched(course: Course, spans: Sequence[Span], now: float) -> Course:
    """The course after one more pass."""
    course = _with_burst(course, spans, now)
    if not spans:
        return course
    index, today = int(now % DAY_SECONDS // DAY_BIN_SECONDS), int(now // DAY_SECONDS)
    day = dict(course.day or {})
    rate, _ = _rate(spans, now - LEVEL_SECONDS)
    seen = day.get(index)
    day[index] = (today, rate if seen is None or seen[0] != today else max(seen[1], rate))
    return replace(course, day=day)


def _with_burst(course: Course, spans: Sequence[Span], now: float) -> Course:
    if now - course.idc_at < BIN_SECONDS:
        return course
    first, second = (_rate_within(spans, now - k * BIN_SECONDS, now - (k - 1) * BIN_SECONDS) for k in (2, 1))
    if first is None or second is None:
        return replace(course, idc_at=now)
    mean = (first + second) / 2.0 * BIN_SECONDS
    if mean < 1.0:
        return replace(course, idc_at=now)
    seen = ((first - second) * BIN_SECONDS) ** 2 / 2.0 / mean
    idc = course.idc + IDC_WEIGHT * (min(MOST_IDC, seen) - course.idc)
    return replace(course, idc=max(LEAST_IDC, idc), idc_at=now)


def _rate(spans: Sequence[Span], since: float) -> tuple[float, float]:
    """Mean rate of the spans that lie after `since` by more than half, of the last one if none does; and the
    seconds that they cover."""
    kept = [one for one in spans if (one.start + one.end) / 2.0 > since] or list(spans[-1:])
    seconds = sum(one.end - one.start for one in kept)
    return (sum(one.count for one in kept) / seconds if seconds > 0 else 0.0), seconds


def _rate_within(spans: Sequence[Span], start: float, end: float) -> float | None:
    kept = [one for one in spans if start < (one.start + one.end) / 2.0 <= end]
    seconds = sum(one.end - one.start for one in kept)
    return sum(one.count for one in kept) / seconds if seconds >= BIN_SECONDS / 2.0 else None


def _trend(spans: Sequence[Span], now: float, mean: float, idc: float) -> float:
    """Requests per second, per second: what of the slope chance does not explain.

    A step looks like a slope to whoever looks across it; the second half of the time tells them apart.
    """
    slope, chance = _slope(spans, now - LEVEL_SECONDS, mean, idc)
    recent, recent_chance = _slope(spans, now - LEVEL_SECONDS / 2.0, mean, idc)
    if slope > 0.0:
        return max(0.0, min(slope - BELIEVED_SLOPE * chance, recent + recent_chance))
    return min(0.0, max(slope + BELIEVED_SLOPE * chance, recent - recent_chance))


def _slope(spans: Sequence[Span], since: float, mean: float, idc: float) -> tuple[float, float]:
    """Of the straight line through the spans since then, and its standard deviation."""
    kept = [one for one in spans if one.start >= since - 1e-6]
    if len(kept) < 3:
        return 0.0, 0.0
    times = [(one.start + one.end) / 2.0 for one in kept]
    weights = [one.end - one.start for one in kept]
    middle = sum(w * t for w, t in zip(weights, times, strict=True)) / sum(weights)
    spread = sum(w * (t - middle) ** 2 for w, t in zip(weights, times, strict=True))
    if spread <= 0.0:
        return 0.0, 0.0
    slope = sum((t - middle) * one.count for t, one in zip(times, kept, strict=True)) / spread
    return slope, sqrt(idc * mean / spread)


def _yesterday(course: Course, at: float) -> float:
    """What came at this time yesterday; nothing where that was not seen."""
    seen = (course.day or {}).get(int(at % DAY_SECONDS // DAY_BIN_SECONDS))
    return seen[1] if seen is not None and seen[0] == int(at // DAY_SECONDS) - 1 else 0.0

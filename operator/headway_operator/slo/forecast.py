"""The rate of requests that replicas asked for now will meet: level, trend, the same time yesterday, bursts.

Arrivals come in slices. Level and trend are what `rate_change` makes of the last two minutes: so a step is
seen within a few passes, a slope is followed, and noise is not. What rises above the mean of all that is
kept (five minutes) is believed as far as earlier rises have lasted (`persistence`). Yesterday is a ring of
ten-minute means.

How bursty arrivals are is measured: the index of dispersion (IDC), variance over mean of counts in
BIN_SECONDS, from their second differences, so that a trend is not taken for a burst. Poisson has 1;
recorded conversations have 4, code completion 70.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway_operator.slo.groups import Groups
from headway_operator.slo.persistence import BIN_SECONDS, Persistence
from headway_operator.slo.rate_change import Span, Trend, rate_within, trend
from headway_operator.slo.slices import Slice

LEVEL_SECONDS = 120.0
# A trend is believed to go on for so much of the level, up or down: a flash crowd ends.
MOST_TREND = 0.5
# However long requests may wait, what began so long ago is looked at.
LONGEST_BURST_SECONDS = 40.0
IDC_WEIGHT = 0.05
LEAST_IDC, MOST_IDC = 1.0, 100.0
DAY_SECONDS = 86_400.0
DAY_BIN_SECONDS = 600.0


NEVER_SEEN, BY_CHANCE = Persistence(), Groups()


@dataclass(frozen=True, slots=True)
class Course:
    """What is remembered of the load. idc_at: when a bin was last counted in. day: by ten minutes of the day,
    the day (whole days since the epoch) that it was seen on, the mean rate, and of how many passes.
    persistence: what came of earlier forecasts. groups: how many requests come with one."""

    idc: float = 1.0
    idc_at: float = 0.0
    day: Mapping[int, tuple[int, float, int]] | None = None
    persistence: Persistence = NEVER_SEEN
    groups: Groups = BY_CHANCE

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        day = {str(index): list(seen) for index, seen in (self.day or {}).items()}
        return {
            "idc": self.idc,
            "idc_at": self.idc_at,
            "day": day,
            "persistence": self.persistence.to_dict(),
            "groups": self.groups.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Course":
        """The reverse of `to_dict`."""
        # Checkpoints of earlier versions do not say how many passes a rate is of.
        day = {
            int(index): (int(seen[0]), float(seen[1]), int(seen[2]) if len(seen) > 2 else 1)
            for index, seen in data["day"].items()
        }
        # Nor do they say what came of forecasts.
        seen_before = data.get("persistence")
        persistence = NEVER_SEEN if seen_before is None else Persistence.from_dict(seen_before)
        # Nor how many requests come with one.
        known = data.get("groups")
        groups = BY_CHANCE if known is None else Groups.from_dict(known)
        return cls(data["idc"], data["idc_at"], day or None, persistence, groups)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests per second. now: the level; ahead: expected when replicas asked for now are ready.
    persistence: the share of a rise, of no more than usual size, that is taken to last so long."""

    now: float
    ahead: float
    idc: float
    persistence: float = 1.0


def arrivals(slices: Sequence[Slice]) -> list[Span]:
    """What came; where somebody did not tell, spread over the time until they did, or left out, where they
    never told."""
    spans: list[Span] = []
    start, count = None, 0.0
    for one in slices:
        if one.total("lost"):
            start, count = None, 0.0
        start = one.start if start is None else start
        count += one.total("arrived")
        if not one.total("blind") and one.end > start:
            spans.append(Span(start, one.end, count))
            start, count = None, 0.0
    return spans


def forecast(
    course: Course, spans: Sequence[Span], now: float, lead_seconds: float, patience_seconds: float = 0.0
) -> Forecast:
    """What to expect `lead_seconds` from now, where requests may wait for so long (patience_seconds): a burst
    that half of it bears calls for nothing."""
    least_seconds = min(LONGEST_BURST_SECONDS, patience_seconds / 2.0)
    level, ahead = _foretold(course, spans, now, lead_seconds, least_seconds)
    lasting = course.persistence.lasting(_mean(spans), ahead)
    expected = max(0.0, lasting, _yesterday(course, now + lead_seconds))
    return Forecast(level, expected, course.idc, course.persistence.share)


def _foretold(
    course: Course, spans: Sequence[Span], now: float, lead_seconds: float, least_seconds: float = 0.0
) -> tuple[float, float]:
    """The level, and what it becomes along the trend, but for what began less than least_seconds ago."""
    seen = _since(spans, now - LEVEL_SECONDS)
    found = trend(seen, course.idc, least_seconds) if seen else Trend(0.0)
    level = max(0.0, found.level)
    most = MOST_TREND * level
    return level, level + max(-most, min(most, found.slope * lead_seconds))


def watched(course: Course, spans: Sequence[Span], now: float, lead_seconds: float) -> Course:
    """The course after one more pass."""
    is_bin_over = now - course.idc_at >= BIN_SECONDS
    course = _with_burst(course, spans, now)
    if not spans:
        return course
    course = replace(course, groups=course.groups.seeing(spans))
    persistence = course.persistence.seeing(spans, now)
    if is_bin_over:
        _, ahead = _foretold(course, spans, now, lead_seconds)
        persistence = persistence.foretelling(now, now + lead_seconds, _mean(spans), ahead, course.idc)
    index, today = int(now % DAY_SECONDS // DAY_BIN_SECONDS), int(now // DAY_SECONDS)
    day = dict(course.day or {})
    rate = _mean(_since(spans, now - LEVEL_SECONDS))
    seen = day.get(index)
    if seen is None or seen[0] != today:
        day[index] = (today, rate, 1)
    else:
        day[index] = (today, seen[1] + (rate - seen[1]) / (seen[2] + 1), seen[2] + 1)
    return replace(course, day=day, persistence=persistence)


def _mean(spans: Sequence[Span]) -> float:
    seconds = sum(one.end - one.start for one in spans)
    return sum(one.count for one in spans) / seconds if seconds > 0 else 0.0


def _with_burst(course: Course, spans: Sequence[Span], now: float) -> Course:
    if now - course.idc_at < BIN_SECONDS:
        return course
    rates = [rate_within(spans, now - k * BIN_SECONDS, now - (k - 1) * BIN_SECONDS) for k in (3, 2, 1)]
    first, second, third = rates
    if first is None or second is None or third is None:
        return replace(course, idc_at=now)
    mean = (first + second + third) / 3.0 * BIN_SECONDS
    if mean < 1.0:
        return replace(course, idc_at=now)
    # A second difference, of six times the variance of one: that of a straight line is 0.
    seen = ((first - 2.0 * second + third) * BIN_SECONDS) ** 2 / 6.0 / mean
    idc = course.idc + IDC_WEIGHT * (min(MOST_IDC, seen) - course.idc)
    return replace(course, idc=max(LEAST_IDC, idc), idc_at=now)


def _since(spans: Sequence[Span], since: float) -> Sequence[Span]:
    """Those that lie after `since` by more than half, the last one if none does."""
    return [one for one in spans if (one.start + one.end) / 2.0 > since] or spans[-1:]


def _yesterday(course: Course, at: float) -> float:
    """What came at this time yesterday; nothing where that was not seen."""
    seen = (course.day or {}).get(int(at % DAY_SECONDS // DAY_BIN_SECONDS))
    return seen[1] if seen is not None and seen[0] == int(at // DAY_SECONDS) - 1 else 0.0

"""`spec.scaling.schedule`: the bounds that hold now, and those that must hold early to be there in time.

An entry holds from each of its starts until the end that follows. While it holds, its minimum counts if it is
above the service's, and its maximum in place of the service's; where several hold, the largest of each. A
minimum comes first where the two contradict. An entry that begins within the time that a replica takes to
start raises the bounds already, and lowers nothing before its time. Nothing is removed because a minimum
ends: the controller lets replicas go as it always does, one at a time, once fewer have been enough. A maximum
is one from its first moment: what is above it goes at once.

Pure: the clock is an argument.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

from headway_operator.slo.target import Target
from headway_operator.spec.schedule import ScheduleEntry


@dataclass(frozen=True, slots=True)
class _Span:
    """One time that an entry holds; ends: None for never."""

    starts: datetime
    ends: datetime | None


def scheduled(target: Target, now: float) -> Target:
    """The target with the bounds of `now`, and in `because` the entries that they come from."""
    if target.fixed_replicas is not None or not target.schedule:
        return target
    lowest, ceilings, raised, told = target.min_replicas, [], 0, []
    for number, entry in enumerate(target.schedule):
        span = _span(entry, now, target.start_seconds)
        if span is None:
            continue
        has_begun = span.starts.timestamp() <= now
        if entry.min_replicas is not None:
            lowest = max(lowest, entry.min_replicas)
        if entry.max_replicas is not None:
            if has_begun:
                ceilings.append(entry.max_replicas)
            else:
                raised = max(raised, entry.max_replicas)
        if has_begun or entry.min_replicas is not None:
            told.append(_words(number, entry, span, target.start_seconds, has_begun=has_begun))
    highest = max(lowest, raised, max(ceilings, default=target.max_replicas))
    return replace(
        target,
        min_replicas=lowest,
        max_replicas=highest,
        may_sleep=target.may_sleep and not lowest,
        because="; ".join(("", *told)),
    )


def _span(entry: ScheduleEntry, now: float, ahead_seconds: float) -> _Span | None:
    """The span that holds now, else the next one if it begins within `ahead_seconds`."""
    at = datetime.fromtimestamp(int(now), ZoneInfo(entry.time_zone))
    last = next(CronSim(entry.start, at + timedelta(seconds=1), reverse=True), None)
    if last is not None:
        ends = next(CronSim(entry.end, last), None)
        if ends is None or at < ends:
            return _Span(last, ends)
    coming = next(CronSim(entry.start, at), None)
    if coming is None or coming.timestamp() > now + ahead_seconds:
        return None
    return _Span(coming, next(CronSim(entry.end, coming), None))


def _words(number: int, entry: ScheduleEntry, span: _Span, start_seconds: float, *, has_begun: bool) -> str:
    bounds = " and ".join(
        f"{word} {count}"
        for word, count in (("at least", entry.min_replicas), ("at most", entry.max_replicas))
        if count is not None
    )
    until = "" if span.ends is None else f" until {_time(span.ends)}"
    if has_begun:
        return f"scaling.schedule[{number}] has {bounds} replicas{until} {entry.time_zone}"
    early = f"early, since one takes up to {start_seconds:.0f} s to start"
    return (
        f"scaling.schedule[{number}] has {bounds} replicas from {_time(span.starts)}{until} "
        f"{entry.time_zone}, asked for {early}"
    )


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"

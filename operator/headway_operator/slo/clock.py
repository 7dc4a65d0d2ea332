"""A clock that was set back: nothing that is remembered may have happened later than now.

Clocks are corrected by a few milliseconds all the time, which `window` and `trust` bear. Set back by more,
what was counted lies in the future and would be taken for recent until the clock has come there again; so it
is forgotten, as across a restart. What was learnt stays.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headway_operator.slo.memory import Memory

TOLERATED_SECONDS = 5.0
# What happened at some time; set back with the clock.
_TIMES = (
    *("limits_changed_at", "replicas_raised_at", "replicas_lowered_at", "violated_since", "violated_at"),
    *("backlog_at", "late_at", "idle_since", "kappa_at", "kappa_cut_at", "patience_at", "removed_at"),
    *("crowded_since", "late_since", "excused_at", "factors_at"),
)


def with_clock(memory: Memory, now: float) -> Memory:
    """The memory as it can be at this time."""
    if max(_told(memory), default=now) <= now + TOLERATED_SECONDS:
        return memory
    changed: dict[str, Any] = {name: _no_later(getattr(memory, name), now) for name in _TIMES}
    changed |= {"slices": (), "recommended": (), "marks": (), "watched_since": now}
    changed["pace"] = memory.pace._replace(
        compared_at=_no_later(memory.pace.compared_at, now),
        contrary_since=_no_later(memory.pace.contrary_since, now),
    )
    if memory.regret is not None:
        at = _no_later(memory.regret.patience_at, now)
        changed["regret"] = replace(memory.regret, patience_at=at)
    return memory._replace(
        began_at=min(memory.began_at, now),
        course=replace(
            memory.course,
            idc_at=min(memory.course.idc_at, now),
            persistence=memory.course.persistence.set_back(now),
            groups=replace(memory.course.groups, at=min(memory.course.groups.at, now)),
        ),
        starts=tuple((min(at, now), seconds) for at, seconds in memory.starts),
        baselines={name: one._replace(at=min(one.at, now)) for name, one in memory.baselines.items()},
        **changed,
    )


def _no_later(at: float | None, now: float) -> float | None:
    return None if at is None else min(at, now)


def _told(memory: Memory) -> Iterator[float]:
    """When memory says that it was last brought up to date."""
    yield memory.began_at
    if memory.slices:
        yield memory.slices[-1].end
    if memory.kappa_at is not None:
        yield memory.kappa_at

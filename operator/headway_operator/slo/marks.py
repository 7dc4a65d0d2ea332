"""What each replica had counted a minute or two ago, so that one can be judged by itself (`sick`).

Only what is judged is kept, and only for so long: it is not part of the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter, sub

from headway_operator.samples import Targets
from headway_operator.slo.baselines import REPLICA_TOTALS, Baseline, Sums

MARK_SECONDS = 60.0
NUM_MARKS = 2
LEAST_SECONDS, LONGEST_SECONDS = 30.0, 180.0

NAMES = ("ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "rejected")
_counted = itemgetter(*(REPLICA_TOTALS.index(name) for name in NAMES))


@dataclass(frozen=True, slots=True)
class Mark:
    """counted: by replica, its instance, the targets that it judged by, and its totals in the order of
    NAMES."""

    at: float
    counted: Mapping[str, tuple[str, Targets, Sums]]


def with_mark(marks: tuple[Mark, ...], baselines: Mapping[str, Baseline], now: float) -> tuple[Mark, ...]:
    """A new one each minute, of which two are kept: the older one is then one to two minutes old."""
    if marks and now - marks[-1].at < MARK_SECONDS:
        return marks
    counted = {
        name: (one.instance, one.targets, _counted(one.totals))
        for name, one in baselines.items()
        if len(one.totals) == len(REPLICA_TOTALS)
    }
    return (*marks, Mark(now, counted))[-NUM_MARKS:]


def usable(marks: tuple[Mark, ...], now: float, since: float) -> Mark | None:
    """The oldest from after `since` that is neither too old nor too young to judge by."""
    return next(
        (one for one in marks if one.at >= since and LEAST_SECONDS <= now - one.at <= LONGEST_SECONDS), None
    )


def counted_since(mark: Mark, name: str, now: Baseline, targets: Targets) -> dict[str, float] | None:
    """What a replica has counted since the mark, by name; None where it judged by other targets, or where its
    totals fell without a restart."""
    if now.targets != targets:
        return None
    totals, before = _counted(now.totals), mark.counted.get(name)
    if before is not None and before[0] == now.instance:
        if before[1] != targets:
            return None
        totals = tuple(map(sub, totals, before[2]))
        if min(totals) < 0:
            return None
    return dict(zip(NAMES, totals, strict=True))

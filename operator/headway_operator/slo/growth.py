"""What replicas and gateways counted since they were last sampled, all together.

A pass reads a hundred replicas, so what they have counted is added up column by column in functions that loop
in C, and what they had counted is known from the pass before. One by one are looked at only those of which
the difference is not what happened: who was met for the first time or restarted, whose totals fell, who
judged by other targets, and who turned requests away.

A restart is told by another `instance`. Totals that fell without one contradict what was told before, and
nobody knows what happened: they are a new beginning and count for nothing.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from operator import is_, le, sub
from typing import NamedTuple

from headway_operator.samples import Targets
from headway_operator.slo.baselines import (
    COUNTED,
    GATEWAY_TOTALS,
    JUDGED,
    LATENCIES,
    REPLICA_TOTALS,
    Baseline,
    Sums,
)

_REJECTED = REPLICA_TOTALS.index("rejected")
# A replica counts whom it turns away among these; see `window`.
_MISSED_AND_REFUSED = tuple(REPLICA_TOTALS.index(name) for name in ("ttft_missed", "e2e_missed"))
_COUNTED_PLACES = tuple(map(REPLICA_TOTALS.index, COUNTED))
_JUDGED_PLACES = tuple(tuple(REPLICA_TOTALS.index(name) for name in pair) for pair in JUDGED)
# What begins anew with new targets, and how many are in histograms, which come and go.
_RESTARTED = (*_COUNTED_PLACES, *chain.from_iterable(_JUDGED_PLACES))

# What one had counted when it was last sampled, if that is known, and has counted now.
Pair = tuple[Baseline | None, Baseline]
# Totals, and counts of each of LATENCIES; () where there are none to tell.
Counted = tuple[Sums, ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """What these had counted, added up column by column. sums: of totals, and of counts of each of LATENCIES.
    numbers: how many told each of these."""

    baselines: tuple[Baseline, ...] = ()
    sums: Counted = ((),) * (1 + len(LATENCIES))
    numbers: tuple[int, ...] = (0,) * (1 + len(LATENCIES))


NO_COLUMNS = Columns()


class Growth(NamedTuple):
    """What was counted: totals that are not 0 by name, counts by latency and bucket. columns: to hand in as
    `known` at the next pass. fallen: of those who now tell less than before, without a restart."""

    totals: dict[str, float]
    counts: dict[str, dict[int, int]]
    columns: Columns
    fallen: Sequence[Baseline] = ()


_UNTOLD: tuple[Sums, ...] = ((),) * len(LATENCIES)


def grown(pairs: Sequence[Pair], targets: Targets, known: Columns) -> Growth:
    """What all of these counted. Exact counters count only where `targets` are what a replica judges by."""
    # Compared once, and then by identity: those of all replicas are mostly one and the same object.
    targets = next((now.targets for _, now in pairs if now.targets == targets), targets)
    plain: list[tuple[Baseline, Baseline]] = []
    others: list[Pair] = []
    for before, now in pairs:
        if before is not None and _is_plain(before, now, targets):
            plain.append((before, now))
        else:
            others.append((before, now))
    then = _columns(tuple([before for before, _ in plain]), known)
    today = _columns(tuple([now for _, now in plain]), like=then)
    added = [tuple(map(sub, now, before)) for now, before in zip(today.sums, then.sums, strict=True)]
    parts: list[Counted] = [tuple(added)]
    if today.numbers != then.numbers or any(min(sums, default=0) < 0 for sums in added):
        # Somebody counts a latency for the first time, or anew.
        parts, others = [], [*pairs]
    fallen = [now for before, now in others if before is not None and _has_fallen(before, now)]
    parts += [
        _growth(before, now, targets) for before, now in others if not any(now is one for one in fallen)
    ]
    totals: dict[str, float] = {}
    for names in (REPLICA_TOTALS, GATEWAY_TOTALS):
        sums = _added([part[0] for part in parts if len(part[0]) == len(names)])
        totals |= {name: value for name, value in zip(names, sums, strict=False) if value}
    for name in COUNTED:
        totals.pop(name, None)  # `counts` say that
    counts = {
        name: {bucket: int(count) for bucket, count in enumerate(_added(some)) if count}
        for name, some in zip(LATENCIES, list(zip(*parts, strict=True))[1:], strict=True)
    }
    return Growth(totals, counts, today, fallen)


def _has_fallen(before: Baseline, now: Baseline) -> bool:
    """Whether totals of one instance fell that only grow, by other targets too."""
    if before.instance != now.instance or len(before.totals) != len(now.totals):
        return False
    fell = (
        place for place, (one, then) in enumerate(zip(now.totals, before.totals, strict=True)) if one < then
    )
    is_replica = len(now.totals) == len(REPLICA_TOTALS)
    restarted = _RESTARTED if before.targets != now.targets else _COUNTED_PLACES
    return any(not is_replica or place not in restarted for place in fell)


def _is_plain(before: Baseline, now: Baseline, targets: Targets) -> bool:
    """Whether the difference is what happened."""
    return (
        before.instance == now.instance
        and len(now.totals) == len(REPLICA_TOTALS)
        and before.totals[_REJECTED] == now.totals[_REJECTED]
        and all(map(le, before.totals, now.totals))
        and (before.targets is now.targets or before.targets == now.targets)
        and (now.targets is targets or now.targets == targets)
    )


def _columns(
    baselines: tuple[Baseline, ...], known: Columns = NO_COLUMNS, like: Columns = NO_COLUMNS
) -> Columns:
    """Not added up again where the baselines are the known ones. like: has buckets that are mostly theirs."""
    if len(baselines) == len(known.baselines) and all(map(is_, baselines, known.baselines)):
        return known
    totals = _added([one.totals for one in baselines])
    sums, numbers = [totals], [len(baselines)]
    for place, counted in enumerate(_COUNTED_PLACES):
        rows = [counts for one in baselines if (counts := one.counts[place])]
        numbers.append(len(rows))
        sums.append(_added_within(rows, like.sums[1 + place], totals[counted] if rows else 0))
    return Columns(baselines, tuple(sums), tuple(numbers))


def _added_within(rows: Sequence[Sums], like: Sums, count: float) -> Sums:
    """Column by column, of rows that count so much in all: first where `like` is not 0, which is often all
    there is."""
    first = next((place for place, one in enumerate(like) if one), None)
    if rows and first is not None:
        end = len(like) - next(place for place, one in enumerate(reversed(like)) if one)
        within = _added([row[first:end] for row in rows])
        if sum(within) == count:
            return (0,) * first + within + (0,) * (len(like) - end)
    return _added(rows)


def _added(rows: Sequence[Sums]) -> Sums:
    """Column by column; () where there is nothing."""
    return tuple(map(sum, zip(*filter(None, rows), strict=True)))


def _growth(before: Baseline | None, now: Baseline, targets: Targets) -> Counted:
    """Of one whose totals did not fall: since `before`; everything where it is None, or of another
    instance."""
    totals = _but_counts(now.totals)
    if before is not None and before.instance == now.instance:
        totals = tuple(map(sub, totals, _but_counts(before.totals)))
    else:
        before = None
    if not now.counts:
        return (totals, *_UNTOLD)
    if now.targets != targets or (before is not None and before.targets != targets):
        totals = _judged(totals, now, before, targets)
    rejected = totals[_REJECTED]
    if rejected:
        others = [*totals]
        for place in _MISSED_AND_REFUSED:
            others[place] = max(0, others[place] - rejected)
        totals = tuple(others)
    if before is None:
        return (totals, *now.counts)
    return (totals, *map(_since, now.counts, before.counts))


def _but_counts(totals: Sums) -> Sums:
    """Without how many are in histograms, which come and go."""
    if len(totals) != len(REPLICA_TOTALS):
        return totals
    others = [*totals]
    for place in _COUNTED_PLACES:
        others[place] = 0
    return tuple(others)


def _since(now: Sums, before: Sums) -> Sums:
    """Counts that one has added to `before`; none where that is not known, or where one of them fell."""
    if not now or not before:
        return ()
    added = tuple(map(sub, now, before))
    return () if min(added) < 0 else added


def _judged(totals: Sums, now: Baseline, before: Baseline | None, targets: Targets) -> Sums:
    """The totals without what was judged by other targets than these."""
    kept = [*totals]
    # Any new target restarts all exact counters.
    is_restarted = before is not None and before.targets != now.targets
    for places, wanted, judged_by in zip(_JUDGED_PLACES, astuple(targets), astuple(now.targets), strict=True):
        for place in places:
            if wanted is None or judged_by != wanted:
                kept[place] = 0
            elif is_restarted:
                kept[place] = now.totals[place]
    return tuple(kept)

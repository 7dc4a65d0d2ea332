"""Replicas without a model of steps: a service's first minute, replicas of an earlier version.

What one of them can do is not known. So a promise that stays broken although limits were moved recommends
half as many more, and measured latencies with room to spare one fewer. Where requests wait too long at every
replica, each does what it can: then as many are recommended as what comes needs by that.
"""

from math import ceil

from headway_operator.slo import histogram
from headway_operator.slo.situation import LIMITS_SETTLE_SECONDS, Situation

# A violation must have lasted this long, where limits can still move and where they cannot.
PATIENCE_SECONDS = 15.0
SHORT_PATIENCE_SECONDS = 6.0
# What one replica fewer may be predicted to use of the targets and memory, and of the cap on running
# sequences.
MOST_TARGET_USE = 0.9
MOST_CAP_USE = 0.7
HEADROOM_WINDOW_SECONDS = 20.0
# Of fewer first tokens there is no telling what a replica does; nor of what is longer ago.
LEAST_SERVED, LONGEST_SECONDS = 20, 30.0


def by_symptoms(situation: Situation, most_added: int, *, can_move_limits: bool) -> int:
    """How many replicas what is measured calls for, within the spec's bounds."""
    desired, now = situation.supply.desired, situation.now
    if situation.is_violated and not situation.sick:
        least = PATIENCE_SECONDS if can_move_limits else SHORT_PATIENCE_SECONDS
        since = situation.memory.violated_since
        if since is None or now - since < least:
            return desired
        lacking = min(most_added, _lacking(situation, since))
        if situation.supply.pending:
            return situation.target.bound_replicas(desired + lacking)
        return situation.target.bound_replicas(desired + max(1, lacking, min(most_added, desired // 2)))
    if _is_one_fewer_enough(situation):
        return situation.target.bound_replicas(max(1, desired - 1))
    return desired


def _lacking(situation: Situation, since: float) -> int:
    """How many more what comes needs than there are and are on their way, by what each that is ready does
    while requests wait too long at all of them; 0 where that is not known. since: the promise is broken."""
    supply, now = situation.supply, situation.now
    acted_at = (situation.memory.limits_changed_at or 0.0) + LIMITS_SETTLE_SECONDS
    since = max(since, acted_at, supply.newest_ready_at, now - LONGEST_SECONDS)
    totals = situation.recent.totals(since)
    seconds = totals.get("replica_seconds", 0.0)
    served = sum(situation.recent.counts("ttft", since).values())
    if not seconds or served < LEAST_SERVED or situation.load.num_late_queues < supply.ready:
        return 0
    return max(0, ceil(situation.forecast.now * seconds / served) - supply.desired)


def _is_one_fewer_enough(situation: Situation) -> bool:
    """Whether everything measured now would keep its margin with one replica fewer."""
    supply, load, target = situation.supply, situation.load, situation.target
    fewer = supply.desired - 1
    if fewer < max(1, target.min_replicas) or not situation.is_whole:
        return False
    if load.kv_use * supply.desired / fewer > MOST_TARGET_USE:
        return False
    if (load.running + load.waiting) / fewer > MOST_CAP_USE * situation.limits.max_num_seqs:
        return False
    # About half of a step is spent on weights, whatever the batch; the other half grows with it.
    growth = 0.5 + 0.5 * supply.desired / fewer
    return all(_has_headroom(situation, name, growth) for name in ("ttft", "tpot"))


def _has_headroom(situation: Situation, name: str, growth: float) -> bool:
    """The latency, grown, stays within MOST_TARGET_USE. No traffic is no load."""
    milliseconds = getattr(situation.target.targets, f"{name}_milliseconds")
    counts = situation.recent.counts(name, situation.now - HEADROOM_WINDOW_SECONDS)
    measured = histogram.percentile(counts, situation.target.percentile)
    return milliseconds is None or measured is None or measured * growth <= MOST_TARGET_USE * milliseconds

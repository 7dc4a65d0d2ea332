"""The number of replicas: when to add, when to remove, and what forbids it.

Added when a promise stays broken: at once after a short patience when no batch limit can help, after a longer
one when limits were raised and did not. Never while ones already asked for are pending, and not before a new
one had time to act. At most doubled and at most +4 at a time, as the queue asks.

Removed one at a time, after one fewer would have been enough for the whole stabilization time without a
break: nothing violated, late, pending or unsampled, and both latencies and the running sequences predicted to
keep a margin. A number that proved too few right after a removal is not tried again for a while. The last
one is not removed this way: that none is needed is for `sleep` to say.
"""

from dataclasses import dataclass
from math import ceil

from headway_operator.slo import histogram
from headway_operator.slo.evidence import since_start
from headway_operator.slo.situation import REPLICA_SETTLE_SECONDS, Situation

# A violation must have lasted this long: where limits can still move, and where they cannot.
PATIENCE_SECONDS = 15.0
SHORT_PATIENCE_SECONDS = 6.0
MOST_ADDED = 4
# What one replica fewer may be predicted to use: of the cap on running sequences, of the latency targets.
MOST_CAP_USE = 0.7
MOST_TARGET_USE = 0.8
HEADROOM_WINDOW_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Raise:
    """More replicas, or what forbids them."""

    replicas: int
    blocker: str


def bar(situation: Situation) -> str:
    """What forbids more replicas for good, or ""."""
    if situation.target.fixed_replicas is not None:
        return "FixedReplicas"
    if situation.other_scaler:
        return "OtherScaler"
    if _is_infeasible(situation):
        return "TargetInfeasible"
    return "AtMaxReplicas" if situation.supply.desired >= situation.target.max_replicas else ""


def more(situation: Situation, *, can_move_limits: bool) -> Raise:
    """How many replicas the violation at hand calls for."""
    supply, target, now = situation.supply, situation.target, situation.now
    desired = supply.desired
    if supply.pending and not (target.fixed_replicas is not None or situation.other_scaler):
        return Raise(desired, "ReplicaPending")
    barred = bar(situation)
    is_newest_settling = supply.ready > 1 and now - supply.newest_ready_at < REPLICA_SETTLE_SECONDS
    # The last replica allowed must have had its time too before anyone says that it did not help.
    if is_newest_settling and barred in ("", "AtMaxReplicas"):
        return Raise(desired, "Settling")
    if barred:
        return Raise(desired, barred)
    patience = PATIENCE_SECONDS if can_move_limits else SHORT_PATIENCE_SECONDS
    since = situation.memory.violated_since
    if since is None or now - since < patience:
        return Raise(desired, "")
    capacity = situation.limits.max_num_seqs * max(1, supply.ready)
    added = max(1, min(MOST_ADDED, max(1, supply.ready), situation.load.waiting // max(1, 2 * capacity)))
    # A replica past its deadline is as good as none, and is asked for once more elsewhere.
    return Raise(target.bound_replicas(desired + added), supply.overdue_reason if supply.overdue else "")


def for_waiting(situation: Situation) -> int:
    """As many as what waits at the gateways calls for, when there is none yet."""
    places = 2 * max(1, situation.limits.max_num_seqs)
    return situation.target.bound_replicas(max(1, min(MOST_ADDED, ceil(situation.load.waiting / places))))


def _is_infeasible(situation: Situation) -> bool:
    """Even nearly idle replicas miss the TTFT target: more of them would miss it as well."""
    return (
        situation.ttft.target_milliseconds is not None
        and situation.is_ttft_bad
        and not situation.is_tpot_bad
        and not situation.is_queue_dominated
        and situation.load.running <= situation.load.num_sampled
    )


def is_one_fewer_enough(situation: Situation) -> bool:
    """Whether everything measured right now would keep its margin with one replica fewer."""
    supply, load, target, memory = situation.supply, situation.load, situation.target, situation.memory
    fewer = supply.desired - 1
    if target.fixed_replicas is not None or situation.other_scaler or fewer < max(1, target.min_replicas):
        return False
    if (
        memory.floor_replicas is not None
        and situation.now < memory.floor_until
        and fewer < memory.floor_replicas
    ):
        return False
    is_whole = (
        supply.ready == supply.existing == supply.desired and not supply.pending and not supply.unsampled
    )
    if not is_whole or not supply.is_gateway_sampled or load.late:
        return False
    if load.kv_use * supply.desired / fewer > MOST_TARGET_USE:
        return False
    if (load.running + load.waiting) / fewer > MOST_CAP_USE * situation.limits.max_num_seqs:
        return False
    # About half of a step is spent on weights, whatever the batch; the other half grows with it.
    growth = 0.5 + 0.5 * supply.desired / fewer
    return all(_has_headroom(situation, name, growth) for name in ("ttft", "tpot"))


def _has_headroom(situation: Situation, name: str, growth: float) -> bool:
    """The latency, grown, stays below 0.8 of its target. No traffic is no load."""
    milliseconds = getattr(situation.target.targets, f"{name}_milliseconds")
    recent = since_start(situation.memory.slices, situation.now - HEADROOM_WINDOW_SECONDS)
    measured = histogram.percentile(recent.counts.get(name, {}), situation.target.percentile)
    return milliseconds is None or measured is None or measured * growth <= MOST_TARGET_USE * milliseconds

"""No replicas at all: when a service falls asleep, what wakes it, and how many come back after a suspension.

A service sleeps while `scaling.minReplicas` is 0 and nobody has asked it for anything for
`scaling.idleSeconds`; where that is not said, for ten minutes or five times what a replica takes to start,
whichever is longer: the longer the way back, the surer it must be that nobody comes. Who asks then is held by
the gateway, whose queue is what wakes it. Nothing sleeps behind a gateway that could not wake it, and nothing
is taken for idle that was not seen.
"""

from headway_operator.slo import replicas
from headway_operator.slo.choice import Choice, hold
from headway_operator.slo.memory import Memory
from headway_operator.slo.situation import Situation
from headway_operator.slo.target import Target

LEAST_IDLE_SECONDS = 600.0
IDLE_STARTS = 5.0


def idle_seconds(target: Target, lead_seconds: float) -> float:
    """For how long nobody must have asked. lead_seconds: until a replica asked for now is ready."""
    if target.idle_seconds is not None:
        return target.idle_seconds
    return max(LEAST_IDLE_SECONDS, IDLE_STARTS * lead_seconds)


def with_idleness(situation: Situation) -> Memory:
    """Since when nobody has asked for anything, as far as can be told."""
    counted, load = situation.supply, situation.load
    is_busy = load.running or load.waiting or load.in_flight or load.received
    is_unknown = counted.is_gateway_lost or not counted.ready
    since = situation.memory.idle_since
    if not situation.target.may_sleep or is_busy or is_unknown:
        return situation.memory if since is None else situation.memory._replace(idle_since=None)
    if _is_unsure(situation):
        # The next sample counts what came meanwhile.
        return situation.memory
    return situation.memory._replace(idle_since=situation.now if since is None else since)


def _is_unsure(situation: Situation) -> bool:
    """Whether somebody who would know of a request gave no sample just now."""
    return bool(situation.supply.unsampled) or not situation.supply.is_gateway_sampled


def wake(situation: Situation) -> Choice:
    """No replica is wanted so far."""
    if not situation.target.may_sleep or situation.other_scaler:
        who = "another scaler" if situation.other_scaler else "spec.replicas"
        return hold(situation, "ScaledToZero", f"{who} asks for 0 replicas")
    waiting = situation.load.waiting
    if not waiting and situation.supply.is_gateway_lost:
        words = "nobody knows whether it is asked for anything: a gateway gives no usable sample"
        return hold(situation, "Asleep", words, "SamplesMissing")
    if not waiting:
        return hold(situation, "Asleep", "nobody asks for anything; the first request starts a replica")
    number = replicas.for_waiting(situation)
    words = f"{waiting} requests wait for a replica: replicas 0 -> {number}"
    return Choice(number, situation.limits, "Woken", words)


def is_idle(situation: Situation) -> bool:
    """Whether nobody has asked for anything for long enough."""
    since = situation.memory.idle_since
    if since is None or not situation.target.may_sleep or situation.other_scaler or _is_unsure(situation):
        return False
    return situation.now - since >= idle_seconds(situation.target, situation.lead_seconds)


def fall_asleep(situation: Situation) -> Choice:
    """None at all, where something would wake the service."""
    desired, since = situation.supply.desired, situation.memory.idle_since or situation.now
    words = f"no request for {situation.now - since:.0f} s"
    if not situation.supply.can_be_woken:
        why = "the gateway, of an earlier version, could not wake the service; a new revision brings another"
        return hold(situation, "GatewayCannotWake", f"{words}; {why}", "GatewayCannotWake")
    return Choice(0, situation.limits, "Idle", f"{words}: replicas {desired} -> 0")


def with_parked(situation: Situation, memory: Memory) -> Memory:
    """How many replicas to come back with; they count as asked for at the moment of coming back."""
    if situation.target.is_suspended:
        return memory._replace(parked_replicas=situation.supply.desired)
    if memory.parked_replicas is None:
        return memory
    return memory._replace(parked_replicas=None, replicas_raised_at=situation.now)

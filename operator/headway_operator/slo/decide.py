"""One pass of the controller: from what is measured to replicas and limits, with the cause in one sentence.

The algorithm:

1. Bring the memory up to date: the window of what happened, targets that changed.
2. Suspended: none. Asleep: as many as what waits at the gateways calls for, which is none while nothing
   does. Without usable samples of at least half of the ready replicas, hold. Where there may be none, and
   nobody has asked for anything for long enough: none (`sleep`).
3. If a promise is violated (statistically, and still being missed): let the last change act; if the queue is
   about to be gone, wait; else move a batch limit (`knobs`) and, when that cannot help or has not helped for
   a while, add replicas (`replicas`).
4. If one replica fewer has been enough for the whole stabilization time, remove one.
5. Otherwise hold, and say why.

Evidence from before a change says nothing about the state after it: rules look only at what was counted since
the last change took effect; the Decision reports the attainment over the whole window.

Pure: the clock and the memory are arguments, the new memory is returned.
"""

from dataclasses import replace

from headway_operator.slo import evidence, knobs, replicas
from headway_operator.slo.choice import Choice, hold
from headway_operator.slo.memory import Memory
from headway_operator.slo.schedule import scheduled
from headway_operator.slo.situation import LIMITS_SETTLE_SECONDS, Situation, supply
from headway_operator.slo.sleep import fall_asleep, is_idle, wake, with_idleness, with_parked
from headway_operator.slo.target import Target
from headway_operator.slo.window import advance, without_exact
from headway_operator.state import Attainment, Decision, Observed, Sample

# A pause of this length ends a violation.
VIOLATION_GAP_SECONDS = 10.0
# The queue now is compared with the queue this long ago.
BACKLOG_SECONDS = 5.0
CEILING_SECONDS = 300.0
# An addition this soon after a removal (in stabilization times) means that the removal was wrong.
REGRET_STABILIZATIONS = 2.0
FLOOR_STABILIZATIONS = 6.0


def decide(
    target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
) -> tuple[Decision, Memory]:
    """Choose replicas and limits from what was measured; returns the memory for the next pass as well."""
    target = scheduled(target, now)
    memory = _up_to_date(target, memory, sample, observed, now)
    now_load = evidence.load(target, memory.slices, sample, now)
    counted = supply(target, memory, sample, observed, now)
    since = max(memory.limits_changed_at or 0.0, counted.newest_ready_at if counted.ready > 1 else 0.0)
    ttft, tpot = evidence.attainments(target, memory.slices, now_load, now, since)
    reported_ttft, reported_tpot = evidence.attainments(target, memory.slices, now_load, now)
    situation = Situation(
        target=target,
        memory=memory,
        supply=counted,
        load=now_load,
        limits=target.bound_limits(memory.limits or evidence.applied_limits(sample) or target.initial),
        ttft=ttft,
        tpot=tpot,
        last_ttft_milliseconds=reported_ttft.p_milliseconds,
        last_tpot_milliseconds=reported_tpot.p_milliseconds,
        other_scaler=observed.other_scaler,
        now=now,
    )
    situation = replace(situation, memory=_with_violation(situation))
    situation = replace(situation, memory=with_idleness(situation))
    choice = _choose(situation)
    decision = Decision(
        at=now,
        replicas=choice.replicas,
        limits=choice.limits,
        cause=choice.cause,
        message=f"{choice.message}{target.because}",
        blocker=choice.blocker or _standing_blocker(situation),
        ttft=reported_ttft,
        tpot=reported_tpot,
        evidence=_numbers(situation),
    )
    return decision, _remembered(situation, choice)


def _up_to_date(target: Target, memory: Memory, sample: Sample, observed: Observed, now: float) -> Memory:
    if memory.began_at == 0.0:
        memory = replace(memory, began_at=now)
    if memory.targets != target.targets:
        slices = tuple(without_exact(one) for one in memory.slices)
        memory = replace(memory, targets=target.targets, slices=slices)
    if memory.initial not in (None, target.initial):
        # The user wants another beginning; what was learned from the old one is not held against that.
        memory = replace(memory, limits=target.initial, limits_changed_at=now)
    memory = replace(memory, initial=target.initial)
    changed_at = memory.limits_changed_at or 0.0
    slices, baselines = advance(
        memory.slices, memory.baselines, sample, observed, target.targets, memory.began_at, changed_at
    )
    return replace(memory, slices=slices, baselines=baselines)


def _with_violation(situation: Situation) -> Memory:
    """Since when the promise has been broken with nothing to mend it under way."""
    memory, now = situation.memory, situation.now
    if situation.is_tpot_bad or (situation.is_ttft_bad and not situation.is_recovering):
        since = now if memory.violated_since is None else memory.violated_since
        return replace(memory, violated_since=since, violated_at=now)
    if memory.violated_at is not None and now - memory.violated_at > VIOLATION_GAP_SECONDS:
        return replace(memory, violated_since=None, violated_at=None)
    return memory


def _choose(situation: Situation) -> Choice:
    counted = situation.supply
    if situation.target.is_suspended:
        return Choice(0, situation.limits, "Suspended", "spec.suspend is true", "Suspended")
    if (
        situation.target.targets.ttft_milliseconds is None
        and situation.target.targets.tpot_milliseconds is None
    ):
        return hold(situation, "NoTarget", "spec.slo sets no target")
    if counted.desired == 0:
        return wake(situation)
    if counted.ready == 0:
        why = f": {counted.pending_reason}" if counted.pending_reason else ""
        return hold(situation, "WaitingForReplicas", f"0 of {counted.desired} replicas ready{why}")
    if 2 * counted.unsampled > counted.ready:
        error = f": {counted.sample_error}" if counted.sample_error else ""
        words = f"{counted.unsampled} of {counted.ready} ready replicas give no usable sample{error}"
        return hold(situation, "HoldingWithoutSamples", words, "SamplesMissing")
    if is_idle(situation):
        return fall_asleep(situation)
    if situation.is_ttft_bad or situation.is_tpot_bad:
        return _help(situation)
    return _remove(situation)


def _help(situation: Situation) -> Choice:
    """A promise is broken: limits, replicas, or the reason why neither."""
    memory, now = situation.memory, situation.now
    words = symptoms(situation)
    if memory.limits_changed_at is not None and now - memory.limits_changed_at < LIMITS_SETTLE_SECONDS:
        return hold(
            situation, "Settling", f"{words}; the last change of limits has not acted yet", "Settling"
        )
    if not situation.is_tpot_bad and situation.is_recovering:
        queue = "shrinks fast enough" if situation.load.waiting else "is gone"
        return hold(situation, "Recovering", f"{words}; the queue {queue}")
    can_add = situation.supply.pending > 0 or not replicas.bar(situation)
    moved = knobs.move(situation, can_add_replicas=can_add)
    raised = replicas.more(situation, can_move_limits=moved is not None)
    added = raised.replicas - situation.supply.desired
    changes = []
    if moved is not None:
        changes.append(moved.words)
    if added:
        changes.append(f"replicas {situation.supply.desired} -> {raised.replicas}")
    if not changes:
        cause = raised.blocker or "Watching"
        why = _BLOCKER_WORDS.get(cause, cause)
        if cause == "ReplicaPending" and situation.supply.pending_reason:
            why = f"{why} ({situation.supply.pending_reason})"
        return hold(situation, cause, f"{words}; {why}", raised.blocker)
    return Choice(
        replicas=raised.replicas,
        limits=situation.limits if moved is None else moved.limits,
        cause=moved.cause if moved is not None and not added else "AddedReplicas",
        message=f"{words}: {', '.join(changes)}",
        blocker="" if added else raised.blocker,
        ceiling=None if moved is None else moved.ceiling,
    )


_BLOCKER_WORDS = {
    "FixedReplicas": "spec.replicas fixes their number and no batch limit helps",
    "OtherScaler": "another scaler sets the replicas",
    "TargetInfeasible": "even an idle replica misses this target, so more would not help",
    "AtMaxReplicas": "scaling.maxReplicas is reached and no batch limit helps",
    "ReplicaPending": "a replica asked for is not ready yet",
    "Settling": "the newest replica has not acted yet",
    "Watching": "not for long enough to add a replica",
}


def _remove(situation: Situation) -> Choice:
    """Nothing is violated: one replica fewer, or hold."""
    memory, now, desired = situation.memory, situation.now, situation.supply.desired
    words = symptoms(situation)
    if not replicas.is_one_fewer_enough(situation):
        return hold(situation, "Steady", words)
    since = now if memory.enough_since is None else memory.enough_since
    wait = situation.target.stabilization_seconds
    if now - since < wait:
        left = f"{desired - 1} replicas would do for {now - since:.0f} of {wait:.0f} s"
        return hold(situation, "Stabilizing", f"{words}; {left}")
    message = f"{words}; {desired - 1} replicas would have done for {now - since:.0f} s: "
    return Choice(
        desired - 1, situation.limits, "RemovedReplica", f"{message}replicas {desired} -> {desired - 1}"
    )


def _standing_blocker(situation: Situation) -> str:
    if situation.target.fixed_replicas is not None:
        return "FixedReplicas"
    if situation.other_scaler:
        return "OtherScaler"
    return (situation.supply.overdue_reason or "PendingPastDeadline") if situation.supply.overdue else ""


def _remembered(situation: Situation, choice: Choice) -> Memory:
    memory, now, desired = situation.memory, situation.now, situation.supply.desired
    memory = replace(memory, replicas=choice.replicas, limits=choice.limits)
    memory = with_parked(situation, memory)
    is_enough = choice.cause in ("Stabilizing", "RemovedReplica")
    memory = replace(memory, enough_since=(memory.enough_since or now) if is_enough else None)
    if choice.limits != situation.limits:
        memory = replace(memory, limits_changed_at=now)
    if choice.ceiling is not None:
        memory = replace(memory, ceiling_seqs=choice.ceiling, ceiling_until=now + CEILING_SECONDS)
    if choice.replicas > desired or memory.replicas_raised_at is None:
        memory = replace(memory, replicas_raised_at=now)
    if choice.cause == "RemovedReplica":
        memory = replace(memory, lowered_to=choice.replicas, lowered_at=now, enough_since=None)
    if choice.replicas > desired:
        memory = _with_regret(situation, memory)
    if memory.backlog_at is None or now - memory.backlog_at >= BACKLOG_SECONDS:
        memory = replace(memory, backlog=situation.load.waiting, backlog_at=now)
    return memory


def _with_regret(situation: Situation, memory: Memory) -> Memory:
    """A removal that had to be taken back teaches a floor."""
    stabilization, now = situation.target.stabilization_seconds, situation.now
    if memory.lowered_at is None or memory.lowered_to is None:
        return memory
    if (
        now - memory.lowered_at > REGRET_STABILIZATIONS * stabilization
        or situation.supply.desired > memory.lowered_to
    ):
        return memory
    floor = memory.lowered_to + 1
    return replace(memory, floor_replicas=floor, floor_until=now + FLOOR_STABILIZATIONS * stabilization)


def symptoms(situation: Situation) -> str:
    """The measured latencies against their targets, and the queue."""
    percentile = situation.target.percentile
    parts = [
        _latency_words(f"P{percentile} {name}", attainment, last)
        for name, attainment, last in (
            ("TTFT", situation.ttft, situation.last_ttft_milliseconds),
            ("TPOT", situation.tpot, situation.last_tpot_milliseconds),
        )
        if attainment.target_milliseconds is not None
    ]
    waiting = f" with {situation.load.waiting} waiting" if situation.load.waiting else ""
    return ", ".join(parts) + waiting


def _latency_words(name: str, attainment: Attainment, last_milliseconds: float | None) -> str:
    measured = last_milliseconds if attainment.p_milliseconds is None else attainment.p_milliseconds
    if measured is None:
        return f"{name} unmeasured (target {attainment.target_milliseconds:g} ms)"
    return f"{name} {measured:.0f} ms against {attainment.target_milliseconds:g} ms"


def _numbers(situation: Situation) -> dict[str, float]:
    load, counted = situation.load, situation.supply
    return {
        "ready": counted.ready,
        "pending": counted.pending,
        "unsampled": counted.unsampled,
        "running": load.running,
        "waiting": load.waiting,
        "late": load.late,
        "oldest_waiting_seconds": round(load.oldest_waiting_seconds, 3),
        "kv_use": round(load.kv_use, 4),
        "queue_milliseconds": round(load.queue_milliseconds, 1),
        "prefill_milliseconds": round(load.prefill_milliseconds, 1),
    }

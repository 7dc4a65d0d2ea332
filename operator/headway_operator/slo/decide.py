"""One pass of the controller: from what is measured to replicas and limits, with the cause in one sentence.

The algorithm:

1. Leave out samples that are too old or contradict the ones before. Bring the memory up to date: the window
   of what happened, targets that changed, and what is learnt from it:
   the time of a step, the work of a request, the course of the load, start-up times (`sizing`).
2. Suspended: none. Asleep: as many as what waits at the gateways calls for, which is none while nothing
   does. Without usable samples of at least half of the ready replicas, hold. Where there may be none, and
   nobody has asked for anything for long enough: none (`sleep`).
3. Move the batch limits to the best ones, trimmed by symptoms (`knobs`), and ask for replicas as the load to
   come needs (`replicas`), both at once if both are due.
4. If fewer replicas have been enough for the whole time looked back, remove one, or a tenth (`removals`).
5. Otherwise hold, and say why.

Evidence from before a change says nothing about the state after it: rules look only at what was counted since
the last change took effect; the Decision reports the attainment over the whole window.

Pure: the clock and the memory are arguments, the new memory is returned.
"""

from headway_operator.samples import Sample
from headway_operator.slo import evidence, knobs, removals, replicas
from headway_operator.slo.choice import Choice, hold
from headway_operator.slo.clock import with_clock
from headway_operator.slo.crowd import with_ceiling, with_revision
from headway_operator.slo.feasibility import infeasible
from headway_operator.slo.history import with_decision
from headway_operator.slo.inputs import inputs
from headway_operator.slo.marks import with_mark
from headway_operator.slo.memory import Memory, Recommended
from headway_operator.slo.patience import Load, with_calm, with_raise, with_removal, with_risen
from headway_operator.slo.schedule import scheduled
from headway_operator.slo.sick import sick
from headway_operator.slo.situation import Situation, supply
from headway_operator.slo.sizing import calibrated, expected, lead_seconds, sizing, with_learning
from headway_operator.slo.sleep import fall_asleep, is_idle, wake, with_idleness, with_parked
from headway_operator.slo.slices import without_exact
from headway_operator.slo.target import Target
from headway_operator.slo.trust import with_trust
from headway_operator.slo.usual import with_latest
from headway_operator.slo.window import Recent, advance
from headway_operator.state import Attainment, Decision, Observed

# A pause of this length ends a violation.
VIOLATION_GAP_SECONDS = 10.0
# The queue now is compared with the queue this long ago.
BACKLOG_SECONDS = 5.0
# Of recommendations the highest of so many seconds is kept.
RECOMMENDATION_SECONDS = 10.0
CONTRADICTED = "its counters fell without a restart"


def decide(
    target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
) -> tuple[Decision, Memory]:
    """Choose replicas and limits from what was measured; returns the memory for the next pass as well."""
    target, sample = scheduled(target, now), evidence.fresh(sample, now)
    memory, happened, contradicted = _up_to_date(target, with_clock(memory, now), sample, observed, now)
    sample = evidence.without(sample, dict.fromkeys(contradicted, CONTRADICTED))
    situation, reported = _situation(target, memory, happened, sample, observed, now)
    for with_more in (_with_violation, with_ceiling, with_trust, with_idleness):
        if (memory := with_more(situation)) is not situation.memory:
            situation = situation._replace(memory=memory)
    moved = knobs.move(situation)
    recommendation = replicas.recommended(situation, can_move_limits=moved is not None)
    situation = situation._replace(memory=_with_recommendation(situation, recommendation))
    choice = _choose(situation, recommendation, moved)
    decision = Decision(
        at=now,
        replicas=choice.replicas,
        limits=choice.limits,
        cause=choice.cause,
        message=f"{choice.message}{target.because}",
        blocker=choice.blocker or _standing_blocker(situation),
        ttft=reported[0],
        tpot=reported[1],
        evidence=inputs(situation, recommendation),
        advice=situation.infeasible if situation.sizing is not None else "",
        sick=situation.sick,
    )
    return decision, with_decision(_remembered(situation, choice, recommendation), decision)


def _situation(
    target: Target, memory: Memory, happened: Recent, sample: Sample, observed: Observed, now: float
) -> tuple[Situation, tuple[Attainment, Attainment]]:
    """Everything to decide from, and TTFT and TPOT over the whole window."""
    now_load = evidence.load(target, happened, sample, now)
    counted = supply(target, memory, sample, observed, now)
    joined_at = counted.newest_ready_at if counted.ready > 1 else 0.0
    settled_at = max(memory.limits_changed_at or 0.0, joined_at)
    since = max(settled_at, memory.kappa_cut_at or 0.0)
    ttft, tpot = reported = evidence.attainments(target, happened, now_load, now)
    if since > now - target.window_seconds:
        ttft, tpot = evidence.attainments(target, happened, now_load, now, since)
    # A gateway knows who is busy; without one requests are spread blindly.
    number, is_routed = max(1, counted.desired), bool(sample.gateways)
    found = sizing(target, memory, happened, number, now, is_routed=is_routed)
    ahead = expected(target, memory, happened, now)
    broken = [
        name
        for name, since_change, whole in zip(("ttft", "tpot"), (ttft, tpot), reported, strict=True)
        if "violated" in (since_change.verdict, whole.verdict)
    ]
    ill = sick(target, memory, sample, found, ahead, broken, joined_at, now)
    limits = target.bound_limits(memory.limits or evidence.applied_limits(sample) or target.initial)
    if now_load.late:
        memory = memory._replace(late_at=now)
    if found is not None:
        memory = memory._replace(factors=found.factors, pace=found.pace)
        if memory.workload is None:
            # What was recommended without a model says nothing of what a replica can do; yet what there is
            # goes no sooner than if it had been recommended now.
            memory = memory._replace(recommended=(Recommended(now, counted.desired, found.told_per_second),))
        settled_at = max(settled_at, memory.replicas_lowered_at or 0.0)
        if memory.late_at is not None:
            # Nor is learnt from answers that began in a crowd.
            settled_at = max(settled_at, memory.late_at + found.replica.answer_seconds(target))
        is_sampled = not counted.unsampled and counted.is_gateway_sampled
        is_quiet = not now_load.late and is_sampled and not ill
        if is_quiet:
            memory = calibrated(memory, happened, found, limits, counted.ready, settled_at, now)
        work, usual = found.replica.workload, memory.usual
        usual = with_latest(usual, work, now) if found.is_of_now else usual
        memory = memory._replace(workload=work, usual=usual)
    situation = Situation(
        target=target,
        memory=memory,
        recent=happened,
        supply=counted,
        load=now_load,
        limits=limits,
        ttft=ttft,
        tpot=tpot,
        last_ttft_milliseconds=reported[0].p_milliseconds,
        last_tpot_milliseconds=reported[1].p_milliseconds,
        other_scaler=observed.other_scaler,
        now=now,
        forecast=ahead,
        lead_seconds=lead_seconds(memory),
        sizing=found,
        infeasible=infeasible(target, found, now_load, ahead, counted.ready, ttft, tpot),
        sick=ill,
    )
    return situation, reported


def _up_to_date(
    target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
) -> tuple[Memory, Recent, frozenset[str]]:
    """The memory, what happened of late, and who contradicts what they told before."""
    if memory.began_at == 0.0:
        memory = memory._replace(began_at=now)
    if memory.targets != target.targets:
        slices = tuple(without_exact(one) for one in memory.slices)
        memory = memory._replace(targets=target.targets, slices=slices, ceiling=None)
    memory = with_revision(memory, observed)
    if memory.initial not in (None, target.initial):
        # The user wants another beginning; what was learned from the old one is not held against that.
        memory = memory._replace(limits=target.initial, limits_changed_at=now)
    changed_at = memory.limits_changed_at or 0.0
    before = memory.baselines
    slices, baselines, columns, contradicted = advance(
        memory.slices, before, sample, observed, target.targets, memory.began_at, changed_at, memory.columns
    )
    since = now if memory.watched_since is None else memory.watched_since
    marks = with_mark(memory.marks, baselines, now)
    memory = memory._replace(
        initial=target.initial,
        slices=slices,
        baselines=baselines,
        columns=columns,
        watched_since=since,
        marks=marks,
    )
    happened = Recent(slices)
    return with_learning(memory, before, happened, observed, now), happened, contradicted


def _with_violation(situation: Situation) -> Memory:
    """Since when the promise has been broken with nothing to mend it under way."""
    memory, now = situation.memory, situation.now
    if situation.is_tpot_bad or (situation.is_ttft_bad and not situation.is_recovering):
        since = now if memory.violated_since is None else memory.violated_since
        return memory._replace(violated_since=since, violated_at=now)
    if memory.violated_at is not None and now - memory.violated_at > VIOLATION_GAP_SECONDS:
        return memory._replace(violated_since=None, violated_at=None)
    return memory


def _with_recommendation(situation: Situation, recommendation: replicas.Recommendation) -> Memory:
    """The highest of each few seconds, over the time looked back."""
    memory, now = situation.memory, situation.now
    since = now - removals.looked_back_seconds(situation)
    kept = tuple(one for one in memory.recommended if one.at > since)
    per_second = situation.sizing.told_per_second if situation.sizing is not None else 0.0
    new = Recommended(now, recommendation.unbounded, per_second, recommendation.roomy)
    if kept and now - kept[-1].at < RECOMMENDATION_SECONDS:
        last = kept[-1]
        highest = max(last, new, key=lambda one: (one.replicas, one.per_second))
        new = highest._replace(at=last.at, roomy=max(last.roomy, new.roomy))
        kept = kept[:-1]
    return memory._replace(recommended=(*kept, new))


def _choose(
    situation: Situation, recommendation: replicas.Recommendation, moved: knobs.Move | None
) -> Choice:
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
        return _begin(situation)
    if 2 * counted.unsampled > counted.ready:
        error = f": {counted.sample_error}" if counted.sample_error else ""
        words = f"{counted.unsampled} of {counted.ready} ready replicas give no usable sample{error}"
        return hold(situation, "HoldingWithoutSamples", words, "SamplesMissing")
    if is_idle(situation):
        return fall_asleep(situation)
    return _act(situation, recommendation, moved)


def _begin(situation: Situation) -> Choice:
    """None is ready yet: what waits meanwhile may call for more."""
    counted = situation.supply
    raised = replicas.more_to_begin(situation)
    why = f": {counted.pending_reason}" if counted.pending_reason else ""
    words = f"0 of {counted.desired} replicas ready{why}"
    if raised.replicas == counted.desired:
        return hold(situation, "WaitingForReplicas", words, raised.blocker)
    change = f"replicas {counted.desired} -> {raised.replicas}"
    words = f"{words}; {situation.load.waiting} requests wait: {change}"
    return Choice(raised.replicas, situation.limits, "AddedReplicas", words)


def _act(situation: Situation, recommendation: replicas.Recommendation, moved: knobs.Move | None) -> Choice:
    """Limits and replicas, both where both are due, or the reason why neither."""
    desired = situation.supply.desired
    if situation.is_violated and situation.is_settling and situation.sizing is None:
        words = f"{symptoms(situation)}; the last change of limits has not acted yet"
        return hold(situation, "Settling", words, "Settling")
    is_ttft_alone = situation.is_violated and not situation.is_tpot_bad
    if situation.sizing is None and is_ttft_alone and situation.is_recovering:
        queue = "shrinks fast enough" if situation.load.waiting else "is gone"
        return hold(situation, "Recovering", f"{symptoms(situation)}; the queue {queue}")
    raised = replicas.Raise(desired, "")
    if recommendation.replicas > desired or situation.is_violated or situation.supply.overdue:
        raised = replicas.more(situation, recommendation.needed)
    after = raised.replicas
    if after == desired and not situation.is_violated:
        after = max(removals.fewer(situation), min(desired, recommendation.replicas))
    changes = [moved.words] if moved is not None else []
    if after != desired:
        changes.append(f"replicas {desired} -> {after}")
    words = "; ".join(part for part in (symptoms(situation), recommendation.words) if part)
    if not changes:
        return _held(situation, recommendation, raised, words)
    cause = "AddedReplicas" if after > desired else "RemovedReplica" if after < desired else ""
    return Choice(
        replicas=after,
        limits=situation.limits if moved is None else moved.limits,
        cause=cause or (moved.cause if moved is not None else ""),
        message=f"{words}: {', '.join(changes)}",
        blocker=raised.blocker,
        trims=None if moved is None else moved.trims,
    )


def _held(
    situation: Situation, recommendation: replicas.Recommendation, raised: replicas.Raise, words: str
) -> Choice:
    """Nothing is changed: because nothing has to be, or because something forbids it."""
    desired, wanted = situation.supply.desired, recommendation.replicas
    blocker = raised.blocker
    if situation.is_violated or wanted > desired:
        if not blocker and situation.sizing is not None and situation.supply.pending:
            blocker = "ReplicaPending"
        cause = blocker or "Watching"
        why = situation.infeasible or situation.sick or _BLOCKER_WORDS.get(cause, cause)
        if cause == "Watching" and situation.sizing is not None:
            why = "there are as many replicas as are thought enough; misses that go on cost trust in that"
        if cause == "ReplicaPending" and situation.supply.pending_reason:
            why = f"{why} ({situation.supply.pending_reason})"
        return hold(situation, cause, f"{words}; {why}", blocker)
    if wanted < desired:
        wait = removals.looked_back_seconds(situation)
        highest = removals.highest(situation)
        left = f"{wanted} replicas would do, {highest} would not have over the last {wait:.0f} s"
        if highest < desired:
            since = situation.memory.watched_since or situation.now
            left = f"{highest} replicas would do for {min(wait, situation.now - since):.0f} of {wait:.0f} s"
        left += removals.regretted(situation) + removals.unseen(situation)
        return hold(situation, "Stabilizing", f"{words}; {left}")
    return hold(situation, "Steady", words)


_BLOCKER_WORDS = {
    "FixedReplicas": "spec.replicas fixes their number and no batch limit helps",
    "OtherScaler": "another scaler sets the replicas",
    "AtMaxReplicas": "scaling.maxReplicas is reached and no batch limit helps",
    "ReplicaPending": "a replica asked for is not ready yet",
    "Settling": "the newest replica has not acted yet",
    "Watching": "not for long enough to add a replica",
}


def _standing_blocker(situation: Situation) -> str:
    if situation.target.fixed_replicas is not None:
        return "FixedReplicas"
    if situation.other_scaler:
        return "OtherScaler"
    return (situation.supply.overdue_reason or "PendingPastDeadline") if situation.supply.overdue else ""


def _remembered(situation: Situation, choice: Choice, recommendation: replicas.Recommendation) -> Memory:
    memory, now, desired = situation.memory, situation.now, situation.supply.desired
    memory = memory._replace(replicas=choice.replicas, limits=choice.limits)
    memory = with_parked(situation, memory)
    if choice.limits != situation.limits:
        memory = memory._replace(limits_changed_at=now)
    if choice.trims is not None:
        memory = memory._replace(trims=choice.trims)
    looked_back = removals.looked_back_seconds(situation)
    load = Load(recommendation.rate, recommendation.per_second, situation.forecast.now)
    if choice.cause == "RemovedReplica":
        memory = with_removal(memory, desired, load, looked_back, now)
    # What stands in for a replica past its deadline, or wakes a service, takes nothing back.
    if choice.replicas > desired and recommendation.replicas > desired > 0:
        memory = with_raise(memory, load, looked_back, now)
    memory = with_calm(with_risen(memory, load, looked_back, now), now)
    if choice.replicas > desired or memory.replicas_raised_at is None:
        memory = memory._replace(replicas_raised_at=now)
    if choice.replicas < desired:
        memory = memory._replace(replicas_lowered_at=now)
    if memory.backlog_at is None or now - memory.backlog_at >= BACKLOG_SECONDS:
        memory = memory._replace(backlog=situation.load.waiting, backlog_at=now)
    return memory


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

"""A canary's steps: replicas and share that the candidate has now, and whether the next step may come.

The candidate starts once every gateway gives it no share. Each step brings up as many replicas as its share
needs, gives the candidate that share once they are ready, waits until every gateway goes by it, and judges it
for as long as the step lasts, a second time where it has been slower. Pure.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

import msgspec

from headway_operator.quality import Gate
from headway_operator.rollout.canary import judge
from headway_operator.rollout.evidence import CanaryEvidence, gathered
from headway_operator.rollout.facts import Facts, Rollout
from headway_operator.rollout.record import Pin
from headway_operator.slo import target_of
from headway_operator.spec.rollout import Canary
from headway_operator.times import seconds, timestamp

WHOLE_WEIGHT = 100
NOT_TOLD = "the gateway does not yet go by the shares"


def with_canary(
    rollout: Rollout,
    canary: Canary,
    stable: Pin,
    facts: Facts,
    gate: Gate | None,
    evidence: CanaryEvidence | None,
) -> Rollout:
    """The rollout as the canary lets it go; a record with a failure gives the candidate up."""
    record = rollout.record
    if record.step >= len(canary.steps):
        return rollout
    share = canary.steps[record.step]
    most = max(1, ceil(facts.wanted * share / WHOLE_WEIGHT))
    weights = _weights(stable, facts, record.weight)
    # What was counted stays while a pass cannot judge it.
    held = replace(rollout, most=most, weights=weights, evidence=evidence)
    if not record.weight and not facts.mine and not _is_told(facts, weights):
        return replace(held, most=0, waits_for=NOT_TOLD)
    if facts.num_ready < most:
        return replace(held, waits_for=facts.cause)
    if record.weight != share:
        record = msgspec.structs.replace(record, weight=share, step_started_at="", slowness="")
        held = replace(held, record=record, weights=_weights(stable, facts, share))
    if not _is_told(facts, held.weights):
        return replace(held, waits_for=NOT_TOLD)
    if not record.step_started_at:
        record = msgspec.structs.replace(record, step_started_at=timestamp(facts.now))
    return _judged(replace(held, record=record), canary, stable, facts, gate, evidence)


def _weights(stable: Pin, facts: Facts, share: int) -> dict[str, int]:
    return {stable.name: WHOLE_WEIGHT - share, facts.candidate.name: share}


def _is_told(facts: Facts, weights: Mapping[str, int]) -> bool:
    gateways = list(facts.sample.gateways.values())
    routings = [None if one is None else one.routing for one in gateways]
    return bool(gateways) and all(one is not None and one.weights == weights for one in routings)


def _judged(
    held: Rollout,
    canary: Canary,
    stable: Pin,
    facts: Facts,
    gate: Gate | None,
    evidence: CanaryEvidence | None,
) -> Rollout:
    record, candidate, target = held.record, facts.candidate, target_of(facts.service.spec)
    evidence = gathered(
        evidence,
        (candidate.name, record.step),
        ((candidate.name, candidate.hash), (stable.name, stable.hash)),
        facts.sample,
        facts.observed,
        target.targets,
        facts.now,
    )
    held = replace(held, evidence=evidence)
    if gate is not None and gate.reason == "Failed":
        failure = facts.given_up("CanaryQualityFailed", gate.message)
        return replace(held, record=msgspec.structs.replace(record, failed=failure))
    num_requests = evidence.candidate.answered.requests
    left = canary.hold_seconds - (facts.now - seconds(record.step_started_at))
    is_last = left <= 0 and num_requests >= canary.min_requests
    finding = judge(evidence, target, is_last=is_last, slowness=record.slowness)
    if finding is not None and finding.is_repeated_first and not record.slowness:
        record = msgspec.structs.replace(record, step_started_at=timestamp(facts.now), slowness="suspected")
        words = f"{finding.message}; the step is repeated, to see whether it stays so"
        return replace(held, record=record, evidence=evidence.repeated, waits_for=words)
    if finding is not None and finding.reason:
        failure = facts.given_up(finding.reason, f"at a share of {record.weight}%, {finding.message}")
        return replace(held, record=msgspec.structs.replace(record, failed=failure))
    if is_last and record.slowness:
        record = msgspec.structs.replace(record, slowness="cleared")
        held = replace(held, record=record)
    if left > 0:
        again = " once again" if record.slowness else ""
        words = f"its share of {record.weight}% is held{again} for {left:.0f} s more"
        return replace(held, waits_for=words)
    if num_requests < canary.min_requests:
        words = f"{num_requests} of rollout.canary.minRequests={canary.min_requests} requests have come"
        return replace(held, waits_for=words)
    if finding is not None:
        return replace(held, waits_for=finding.message)
    if gate is not None and not gate.is_open:
        return replace(held, waits_for=f"its quality is not verified: {gate.message}")
    record = msgspec.structs.replace(
        record, step=record.step + 1, step_started_at="", slowness="", progressed_at=timestamp(facts.now)
    )
    is_over = record.step == len(canary.steps)
    if is_over:
        record = msgspec.structs.replace(record, weight=0)
    return replace(
        held,
        record=record,
        most=None if is_over else held.most,
        weights={} if is_over else held.weights,
        waits_for="",
    )

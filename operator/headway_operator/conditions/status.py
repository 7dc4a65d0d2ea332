"""The whole status of a service, and when it is worth a write."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headway_operator import names
from headway_operator.conditions import lack as lacks
from headway_operator.conditions import rest, rollouts, rules, slo_rules
from headway_operator.conditions.condition import Condition, written
from headway_operator.conditions.lack import Lack
from headway_operator.conditions.problems import NO_PROBLEMS, Problems
from headway_operator.conditions.startup import startup
from headway_operator.errors import SpecError
from headway_operator.plan import wanted_replicas
from headway_operator.quality import Gate
from headway_operator.quality.judgement import as_status
from headway_operator.rollout import Rollout
from headway_operator.rollout import as_status as rollout_status
from headway_operator.samples import Limits, Sample
from headway_operator.spec import Manifest, Service, generation_of
from headway_operator.state import Attainment, Decision, Observed, Rendered, RevisionPin, ServiceKey
from headway_operator.times import drawn_share, seconds, timestamp

# Numbers that move with every request are written at least this often, and no more than twice as often;
# everything else at once.
REFRESH_SECONDS = 90.0
# Of many services all together no more of these are written than this.
MOST_REFRESHES_PER_SECOND = 4.0
# Likewise a status of which nothing moves, which shows that somebody still looks.
HEARTBEAT_SECONDS = 600.0
# Decisions before the last one; a hundred, with their numbers, are in the checkpoint.
MOST_EARLIER_DECISIONS = 5
_QUALITY_WORDS = {
    "Passed": "passed",
    "NothingToJudge": "passed",
    "Failed": "failed",
    "TimedOut": "timed out",
    "JobFailed": "not judged",
    "FileMissing": "file missing",
    "VerdictLost": "verifying",
    "Verifying": "verifying",
    "ScaledToZero": "waiting",
    "AwaitingModel": "waiting",
    "Suspended": "waiting",
}


def status(
    service: Service,
    rendered: Rendered,
    observed: Observed,
    sample: Sample,
    decision: Decision,
    now: float,
    problems: Problems = NO_PROBLEMS,
    gate: Gate | None = None,
    rollout: Rollout | None = None,
    lack: Lack | None = None,
) -> dict[str, Any]:
    """The whole status; `service.status` is the previous one, from which transition times are kept.

    problems: what failed in this pass; it shows in the condition Degraded. gate: None where the
    service asks for no judgement. lack: why what the spec asks for cannot be started, if it cannot.
    """
    rollout = Rollout() if rollout is None else rollout
    wanted = wanted_replicas(service, decision)
    num_ready = sum(replica.phase == "ready" for replica in observed.replicas)
    revision = rendered.revision
    before = {one["type"]: one for one in service.status.get("conditions") or ()}
    conditions = [
        rest.ready(service, observed, decision)
        or lacks.ready(service, observed, decision, rendered, lack)
        or rules.ready(service, observed, decision, rendered, gate),
        rest.progressing(service, observed, decision)
        or rollouts.progressing(service, rendered, observed, wanted, rollout)
        or lacks.progressing(rendered, lack)
        or rules.progressing(service, rendered, observed, decision, gate),
        slo_rules.slo_met(decision),
        slo_rules.slo_feasible(decision, before.get("SLOFeasible", {}), service.generation),
        slo_rules.scaling_active(decision),
        lacks.model_available(lack) or rules.model_available(service, observed, decision),
        _degraded(rules.degraded(observed, decision, gate, problems), rollout, lack),
        None if gate is None else rules.quality_verified(gate),
    ]
    limits = _applied_limits(sample, decision)
    percentile = service.spec.slo.percentile if service.spec.slo else 95
    starts = startup(service, observed, sample, now)
    earlier, last = _decisions(decision, service.status)
    return {
        **({} if gate is None else {"quality": _quality(gate, rendered)}),
        "observedGeneration": service.generation,
        "conditions": written(
            [condition for condition in conditions if condition is not None],
            service.status.get("conditions") or [],
            service.generation,
            now,
        ),
        "replicas": len(observed.replicas),
        "readyReplicas": num_ready,
        "desiredReplicas": wanted,
        "selector": names.selector_text(names.component_selector(service.name, names.RUNTIME_COMPONENT)),
        "url": observed.url,
        "limits": {
            "maxNumSeqs": limits.max_num_seqs,
            "maxNumBatchedTokens": limits.max_num_batched_tokens,
        },
        "slo": {
            "ttftMilliseconds": _latency(decision.ttft, percentile),
            "tpotMilliseconds": _latency(decision.tpot, percentile),
            **_end_to_end(decision, percentile),
        },
        **({} if lack is not None and rendered.serves_nothing else {"revision": _pin(revision)}),
        "rollout": rollout_status(rollout.record),
        **({"startup": starts} if starts else {}),
        **({"recommendation": decision.advice} if decision.advice else {}),
        "lastDecision": last,
        **({"earlierDecisions": earlier} if earlier else {}),
        "display": {
            "replicas": f"{num_ready}/{wanted}",
            "ttft": _display(decision.ttft, percentile),
            "tpot": _display(decision.tpot, percentile),
            **({} if gate is None else {"quality": _QUALITY_WORDS[gate.reason]}),
        },
        "updatedAt": timestamp(now),
    }


def _decisions(
    decision: Decision, before: Mapping[str, Any]
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Those before, the latest first, and this one; before: the last status. What says the same as the last
    one stands in its place and keeps its `since`."""
    last, earlier = before.get("lastDecision") or {}, before.get("earlierDecisions") or []
    said = {
        "replicas": decision.replicas,
        "maxNumSeqs": decision.limits.max_num_seqs,
        "maxNumBatchedTokens": decision.limits.max_num_batched_tokens,
        "cause": decision.cause,
        "blocker": decision.blocker,
    }
    stands = bool(last.get("since")) and all(last.get(key) == value for key, value in said.items())
    if last and not stands:
        earlier = [last, *earlier][:MOST_EARLIER_DECISIONS]
    candidate = decision.evidence.get("recommended_replicas")
    return list(earlier), {
        "time": timestamp(decision.at),
        "since": last["since"] if stands else timestamp(decision.at),
        **said,
        **({} if candidate is None else {"candidateReplicas": int(candidate)}),
        "message": decision.message,
    }


def standing(current: Mapping[str, Any], manifest: Manifest, error: SpecError, now: float) -> dict[str, Any]:
    """The status of a service that goes by an earlier spec, since its own cannot be honoured.

    current: what that spec's status is. What it says keeps that generation as `observedGeneration`: whoever
    waits for the new one to be Ready (`kubectl wait`) goes on waiting. Degraded alone is of the new one.
    """
    in_force = current["observedGeneration"]
    message = f"{error}; generation {in_force} of the spec stays in force"
    before = (manifest.get("status") or {}).get("conditions") or []
    [degraded] = written(
        [Condition("Degraded", "True", error.reason, message)], before, generation_of(manifest), now
    )
    conditions = [degraded if one["type"] == "Degraded" else one for one in current["conditions"]]
    return {**current, "observedGeneration": generation_of(manifest), "conditions": conditions}


def refused(manifest: Manifest, error: SpecError, now: float) -> dict[str, Any]:
    """The status of a service whose spec cannot be honoured; what already serves is left as it is."""
    previous = dict(manifest.get("status") or {})
    generation = generation_of(manifest)
    conditions = [
        Condition("Ready", "False", error.reason, str(error)),
        Condition("Degraded", "True", error.reason, str(error)),
    ]
    return {
        **previous,
        "observedGeneration": generation,
        "conditions": written(conditions, previous.get("conditions") or [], generation, now),
        "updatedAt": timestamp(now),
    }


def faulted(manifest: Manifest, error: SpecError, now: float) -> dict[str, Any]:
    """The status of a service over which the operator failed once it knew what there is: as it was.

    Degraded alone says it. Nothing was changed, so that what was said of what serves holds; before anything
    was said Ready says it, too.
    """
    previous = dict(manifest.get("status") or {})
    before = previous.get("conditions") or []
    told = [Condition("Degraded", "True", error.reason, str(error))]
    if not any(one["type"] == "Ready" for one in before):
        told.append(Condition("Ready", "False", error.reason, str(error)))
    new = {one["type"]: one for one in written(told, before, generation_of(manifest), now)}
    kept = [new.pop(one["type"], one) for one in before]
    return {
        **previous,
        "observedGeneration": previous.get("observedGeneration", generation_of(manifest)),
        "conditions": [*kept, *new.values()],
        "updatedAt": timestamp(now),
    }


def worth_writing(
    key: ServiceKey, previous: Mapping[str, Any], new: Mapping[str, Any], now: float, num_services: int = 1
) -> bool:
    """Whether `new` says something that `previous` did not, or a number that moved some time ago.

    num_services: whose statuses the same operator writes.
    """
    if "updatedAt" not in previous or _lasting(previous) != _lasting(new):
        return True
    updated_at = previous["updatedAt"]
    age, share = now - seconds(updated_at), 0.5 + drawn_share(key, updated_at) / 2
    refresh = max(REFRESH_SECONDS, num_services / MOST_REFRESHES_PER_SECOND)
    return age >= HEARTBEAT_SECONDS * share or (
        age >= refresh * share and _timeless(previous) != _timeless(new)
    )


def _timeless(written_status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without the times that every pass moves; what is null is as good as not there."""
    decision = {**(written_status.get("lastDecision") or {}), "time": None}
    return _without_nulls({**written_status, "updatedAt": None, "lastDecision": decision})


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if value is not None
    }


def _lasting(written_status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what moves with every request: measured numbers, sentences and times."""
    lasting = {
        key: value
        for key, value in written_status.items()
        if key not in ("conditions", "slo", "lastDecision", "display", "updatedAt", "recommendation")
    }
    lasting["has_recommendation"] = bool(written_status.get("recommendation"))
    lasting["conditions"] = [
        [condition.get(key) for key in ("type", "status", "reason", "observedGeneration")]
        for condition in written_status.get("conditions") or []
    ]
    lasting["lastDecision"] = {
        key: value
        for key, value in (written_status.get("lastDecision") or {}).items()
        if key not in ("time", "message", "candidateReplicas")
    }
    latencies = written_status.get("slo") or {}
    lasting["targets"] = {name: (latency or {}).get("target") for name, latency in latencies.items()}
    return lasting


def _degraded(otherwise: Condition, rollout: Rollout, lack: Lack | None) -> Condition:
    """What is wrong now comes before what was given up."""
    if otherwise.status == "True":
        return otherwise
    return lacks.degraded(lack) or rollouts.degraded(rollout) or otherwise


def _pin(revision: RevisionPin) -> dict[str, str | int]:
    return {
        "name": revision.name,
        "hash": revision.hash,
        "runtimeImage": revision.runtime_image,
        "gatewayImage": revision.gateway_image,
        "gatewayHash": revision.gateway_hash,
        "specHash": revision.spec_hash,
        "gatewaySpecHash": revision.gateway_spec_hash,
        "drainTimeoutSeconds": revision.drain_timeout_seconds,
    }


def _quality(gate: Gate, rendered: Rendered) -> dict[str, Any]:
    """What the gate says, its numbers, and what it remembers."""
    facts = {"reason": gate.reason, "hash": gate.hash, "job": gate.job, "withheld": rendered.withheld}
    numbers = {} if gate.judgement is None else as_status(gate.judgement)
    return {
        **{name: fact for name, fact in facts.items() if fact},
        **{name: numbers[name] for name in ("finishedAt", "checks", "text", "tasks") if name in numbers},
        "history": [as_status(judgement) for judgement in gate.history],
    }


def _applied_limits(sample: Sample, decision: Decision) -> Limits:
    """What most replicas run with; what was decided while none has said."""
    applied = Counter(replica.limits for replica in sample.replicas.values() if replica is not None)
    return applied.most_common(1)[0][0] if applied else decision.limits


def _end_to_end(decision: Decision, percentile: int) -> dict[str, Any]:
    """Absent without such a target."""
    if decision.end_to_end.target_milliseconds is None:
        return {}
    return {"endToEndMilliseconds": _latency(decision.end_to_end, percentile)}


def _latency(attainment: Attainment, percentile: int) -> dict[str, Any]:
    num_requests = attainment.met + attainment.missed
    facts = {
        "target": attainment.target_milliseconds,
        "value": None if attainment.p_milliseconds is None else round(attainment.p_milliseconds, 1),
        "percentile": percentile,
        "attainment": round(attainment.met / num_requests, 4) if num_requests else None,
        "verdict": attainment.verdict,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _display(attainment: Attainment, percentile: int) -> str:
    if attainment.p_milliseconds is None and attainment.target_milliseconds is None:
        return "-"
    measured = "-" if attainment.p_milliseconds is None else f"{attainment.p_milliseconds:.0f}"
    target = "" if attainment.target_milliseconds is None else f"/{attainment.target_milliseconds:.0f}"
    return f"P{percentile} {measured}{target} ms"

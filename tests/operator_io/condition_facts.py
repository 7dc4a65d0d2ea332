"""Everything that makes a condition: what each of it says, as pairs of a condition and its reason."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import conditions, errors
from headway_operator.cluster import kubernetes_causes as causes
from headway_operator.cluster.kubernetes_observation import Found, observed
from headway_operator.cluster.local_exit import explain_exit
from headway_operator.manifests import render
from headway_operator.names import KIND, component_labels
from headway_operator.quality import Gate, awaiting_model
from headway_operator.rollout import Record, Rollout
from headway_operator.rollout.record import Failure, Pin
from headway_operator.rollout.trouble import is_failing
from headway_operator.samples import Limits, Sample
from headway_operator.spec import Service, parse
from headway_operator.state import (
    Attainment,
    Decision,
    Gateway,
    Observed,
    Rendered,
    Replica,
    ServiceKey,
    Site,
)

ROOT = Path(__file__).parents[2]
RECORDED = yaml.safe_load(Path(__file__).with_name("pods.yaml").read_text())
KEY, UID = ServiceKey("default", "demo"), "u1"
# Five minutes after the pods were made, so that none of them is only late.
NOW = causes.seconds_of("2026-11-01T11:05:00Z")
SITE = Site("kubernetes", "runtime:1", "gateway:1", "/etc/headway/admin/public.pem", (), 8000)
MET, VIOLATED = Attainment(300.0, 212.0, 480, 3, "met"), Attainment(300.0, 840.0, 60, 40, "violated")
SILENT, FEW = Attainment(300.0, None, 0, 0, "unknown"), Attainment(300.0, 250.0, 7, 0, "unknown")
NO_TARGET = Attainment(None, None, 0, 0, "unknown")
STEADY = Decision(NOW, 2, Limits(8, 512), "Steady", "P95 TTFT 212 ms", "", MET, NO_TARGET, {})
Facts = set[tuple[str, str]]
GIVEN_UP_REASONS = (
    *("ProgressDeadlineExceeded", "CandidateFailed", "CanaryErrors", "CanaryQualityFailed"),
    *("CanaryTTFTViolated", "CanaryTPOTViolated", "CanaryTTFTSlower", "CanaryTPOTSlower"),
)


def service(status: dict[str, Any] | None = None, **spec: Any) -> Service:
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": UID, "generation": 3},
        "spec": {"model": {"source": "bundled://headway-tiny"}, "slo": {"ttftMilliseconds": 300}, **spec},
        "status": status or {},
    }
    return parse(manifest)


def current_revision() -> str:
    return render(service(), SITE, "PEM", frozenset()).revision.hash


def pod(status: dict[str, Any], name: str = "demo-x", revision: str = "", **metadata: Any) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(RECORDED["common"])
    labels = component_labels(KEY.name, "runtime") | {
        "serving.headway.dev/revision": revision or current_revision()
    }
    made["metadata"] |= {"name": name, "uid": name, "labels": labels, **metadata}
    return made | {"status": status}


def told(
    watched: Observed,
    decision: Decision = STEADY,
    one: Service | None = None,
    gate: Gate | None = None,
    problems: conditions.Problems | None = None,
    rendered: Rendered | None = None,
    rollout: Rollout | None = None,
    lack: conditions.Lack | None = None,
) -> Facts:
    """Each condition with its reason."""
    one = one or service()
    rendered = rendered or render(one, SITE, "PEM", frozenset())
    failed = problems or conditions.Problems()
    status = conditions.status(
        one, rendered, watched, Sample(NOW), decision, NOW, failed, gate, rollout, lack
    )
    return {(condition["type"], condition["reason"]) for condition in status["conditions"]}


def of_pods(*pods: dict[str, Any], events: Iterable[dict[str, Any]] = ()) -> Observed:
    return observed(KEY, UID, Found({}, pods, events={"demo-x": list(events)}))


def recorded_pods() -> Iterator[Facts]:
    for case in RECORDED["cases"].values():
        watched = of_pods(pod(case["status"], **case.get("metadata", {})), events=case.get("events", ()))
        yield told(watched)
    for case in RECORDED["losses"].values():
        lost = pod(case["status"], creationTimestamp="2026-11-01T11:04:00Z")
        yield told(of_pods(lost))
        yield told(of_pods(lost, pod(RECORDED["cases"]["ready"]["status"], "demo-y")))


REFUSALS = ("exceeded quota: gpus", 'admission webhook "a" denied the request: no', "no service account")


def refused_deployment(words: str, component: str, num_updated: int = 0) -> dict[str, Any]:
    """For two pods, of which the API server refuses some."""
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": words}
    labels = component_labels(KEY.name, component)
    if component == "runtime":
        labels |= {"serving.headway.dev/revision": current_revision()}
    owner = {"kind": KIND, "uid": UID, "controller": True}
    metadata = {"name": f"demo-{component}", "labels": labels, "ownerReferences": [owner]}
    metadata["creationTimestamp"] = "2026-11-01T10:00:00Z"
    status = {"conditions": [failure], "updatedReplicas": num_updated}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": status}


def uncreated_pods() -> Iterator[Facts]:
    for words in REFUSALS:
        yield told(observed(KEY, UID, Found({"Deployment": [refused_deployment(words, "runtime")]}, [])))


def gateway_pod(case: str, name: str = "demo-x") -> dict[str, Any]:
    recorded = RECORDED["cases"][case]
    labels = component_labels(KEY.name, "gateway")
    return pod(recorded["status"], name, **{**recorded.get("metadata", {}), "labels": labels})


def gateway_of(
    *pods: dict[str, Any],
    deployment: dict[str, Any] | None = None,
    events: Iterable[dict[str, Any]] = (),
) -> Gateway:
    children = {"Deployment": [deployment] if deployment else []}
    return observed(KEY, UID, Found(children, pods, events={"demo-x": list(events)})).gateway


def gateways() -> Iterator[Facts]:
    """In trouble, alone or beside another one that serves; replicas are ready."""
    another = gateway_pod("ready", "demo-y")
    for name, case in RECORDED["cases"].items():
        for others in ((), (another,)):
            gateway = gateway_of(gateway_pod(name), *others, events=case.get("events", ()))
            yield told(replace(own_replicas(2), gateway=gateway))
    for words in REFUSALS:
        for pods in ((), (another,)):
            gateway = gateway_of(*pods, deployment=refused_deployment(words, "gateway"))
            yield told(replace(own_replicas(2), gateway=gateway))


def ready(name: str = "a", revision: str = "old") -> Replica:
    return Replica(name, revision, "ready", "http://a:8000", 0.0, 0.0)


def own_replicas(count: int, one: Service | None = None) -> Observed:
    """Ready replicas of the current revision, behind a ready gateway."""
    revision = render(one or service(), SITE, "PEM", frozenset()).revision.hash
    replicas = tuple(ready(f"r{number}", revision) for number in range(count))
    return Observed(replicas=replicas, gateway=Gateway(ready=True))


def lives() -> Iterator[Facts]:
    """From nothing to serving, out and back."""
    yield told(Observed())
    yield told(Observed(), one=service(replicas=0))
    yield told(own_replicas(2))
    yield told(replace(own_replicas(2), gateway=Gateway()))
    yield told(own_replicas(3))
    yield told(own_replicas(1))
    yield told(Observed(replicas=(ready(),), gateway=Gateway(ready=True)))
    loading = replace(ready(), phase="starting", ready_at=None)
    yield told(Observed(replicas=(loading,)))
    yield told(Observed(replicas=(loading,)), one=service(model={"source": "hf://org/name"}))


def decisions() -> Iterator[Facts]:
    for ttft, tpot in (
        *((VIOLATED, NO_TARGET), (NO_TARGET, VIOLATED), (VIOLATED, VIOLATED)),
        *((SILENT, NO_TARGET), (FEW, NO_TARGET), (NO_TARGET, NO_TARGET)),
    ):
        yield told(own_replicas(2), replace(STEADY, ttft=ttft, tpot=tpot))
    whole = Attainment(9000.0, 12000.0, 60, 40, "violated")
    for ttft, tpot in ((MET, NO_TARGET), (VIOLATED, MET), (MET, VIOLATED), (VIOLATED, VIOLATED)):
        yield told(own_replicas(2), replace(STEADY, ttft=ttft, tpot=tpot, end_to_end=whole))
    for blocker in (
        *("FixedReplicas", "OtherScaler", "AtMaxReplicas", "ReplicaPending", "Settling"),
        *("PendingPastDeadline", "SamplesMissing", "TargetInfeasible", "Unschedulable"),
    ):
        yield told(own_replicas(2), replace(STEADY, blocker=blocker, ttft=VIOLATED))
    sick = replace(STEADY, blocker="SickReplica", sick="words", ttft=VIOLATED)
    yield told(own_replicas(2), sick)


def gates() -> Iterator[Facts]:
    withheld = replace(render(service(), SITE, "PEM", frozenset()), withheld="demo-new")
    nothing_yet = replace(withheld, withheld=withheld.revision.name)
    for state, reason in (
        *(("Unknown", "Verifying"), ("Unknown", "VerdictLost"), ("Unknown", "FileMissing")),
        *(("Unknown", "ScaledToZero"), ("True", "Passed"), ("True", "NothingToJudge")),
        *(("False", "Failed"), ("False", "TimedOut"), ("False", "JobFailed")),
    ):
        gate = Gate(state, reason, "words")  # type: ignore[arg-type]
        one = service(replicas=0) if reason == "ScaledToZero" else service()
        yield told(own_replicas(2), gate=gate, one=one)
        if state != "True":
            yield told(own_replicas(2), gate=gate, rendered=withheld, one=one)
            yield told(Observed(), gate=gate, rendered=nothing_yet, one=one)


def rests() -> Iterator[Facts]:
    """Without replicas on purpose."""
    yield told(own_replicas(1), replace(STEADY, blocker="GatewayCannotWake"))
    for cause in ("Idle", "Asleep"):
        yield told(Observed(gateway=Gateway(ready=True)), replace(STEADY, replicas=0, cause=cause))
    suspended = replace(STEADY, replicas=0, cause="Suspended", blocker="Suspended")
    gate = Gate("Unknown", "Suspended", "words")
    for one in (Observed(), own_replicas(2)):
        yield told(one, suspended, service(suspend=True), gate)


def rollouts() -> Iterator[Facts]:
    """Under way, waiting for room, and given up for each cause."""
    current = render(service(), SITE, "PEM", frozenset()).revision
    old = ready("old", "0ld00000")
    roomless = replace(
        ready("new", current.hash),
        phase="pending",
        ready_at=None,
        reason="Unschedulable",
        message="Insufficient nvidia.com/gpu",
    )
    under_way = Rollout(Record(stable=Pin.of(replace(current, name="demo-0ld00000")), candidate=current.name))
    yield told(own_replicas(0), rollout=replace(under_way, is_paused=True, refusal="422: Invalid value"))
    for one in (service(), service(rollout={"maxUnavailable": 0})):
        yield told(Observed(replicas=(old, roomless)), one=one, rollout=under_way)
    yield told(Observed(replicas=(old, ready("new", current.hash))), rollout=replace(under_way, most=1))
    for case in RECORDED["cases"].values():
        (mine,) = of_pods(pod(case["status"]), events=case.get("events", ())).replicas
        is_paused = is_failing(mine)
        yield told(Observed(replicas=(old, mine)), rollout=replace(under_way, is_paused=is_paused))
    for reason in GIVEN_UP_REASONS:
        failed = Failure("demo-new", "spec", reason, "words", "2026-11-01T11:00:00Z")
        record = Record(stable=under_way.record.stable, failed=failed)
        yield told(own_replicas(2), rollout=Rollout(record))


def failures() -> Iterator[Facts]:
    """Each error that a step of a pass may end with, and a spec that cannot be honoured."""
    for error in (
        *(errors.ClusterError, errors.ConflictError, errors.FieldConflictError, errors.AdmissionError),
        *(errors.ForbiddenError, errors.UnavailableError, errors.ScrapeError),
    ):
        problems = conditions.Problems(("apply Service demo: no",), error.condition_reason)
        yield told(own_replicas(2), problems=problems)
    yield from refusals(errors.InternalError(AttributeError("'str' object has no attribute 'get'")))
    for wrong in (
        {"dtype": "x"},
        {"template": {"spec": {"hostNetwork": True}}},
        {"tensorParallelSize": 2, "nodesPerReplica": 2},
    ):
        with pytest.raises(errors.SpecError) as caught:
            render(service(**wrong), SITE, "PEM", frozenset())
        yield from refusals(caught.value)


def refusals(error: errors.SpecError) -> Iterator[Facts]:
    """With and without an earlier spec in force."""
    manifest = {"metadata": {"generation": 3}}
    degraded = {"type": "Degraded", "status": "False"}
    in_force = {"observedGeneration": 2, "conditions": [degraded]}
    for status in (
        conditions.refused(manifest, error, NOW),
        conditions.standing(in_force, manifest, error, NOW),
    ):
        yield {(condition["type"], condition["reason"]) for condition in status["conditions"]}


def local_processes() -> Iterator[Facts]:
    """What `headway up` says has the same words."""
    for ending in (
        (-9, "not ready", 0),
        (-9, "/health failed", 0),
        (-9, "", 1),
        (3, "", 0),
        (1, "", 0),
        (4, "", 0),
    ):
        reason, message = explain_exit(*ending, "boom")
        crashed = replace(ready(), phase="failed", ready_at=None, reason=reason, message=message)
        yield told(Observed(replicas=(crashed,)))


def lacks() -> Iterator[Facts]:
    """Without the model that the spec asks for, with and without an older one that serves."""
    own = render(service(), SITE, "PEM", frozenset())
    serving, nothing_yet = replace(own, withheld="demo-new"), replace(own, withheld=own.revision.name)
    judged = service(quality={}, quantization="int8")
    for name in ("Missing", "Fetching", "Failed"):
        lack = conditions.Lack(f"ModelCache{name}", "words", is_stuck=name != "Fetching")
        yield told(Observed(), rendered=nothing_yet, lack=lack)
        yield told(own_replicas(2), rendered=serving, lack=lack, gate=awaiting_model(judged, "words"))


PRODUCERS = (
    *(
        recorded_pods,
        uncreated_pods,
        gateways,
        lives,
        decisions,
        gates,
        rests,
        rollouts,
        failures,
        local_processes,
    ),
    lacks,
)


def produced() -> Facts:
    return {fact for producer in PRODUCERS for facts in producer() for fact in facts}

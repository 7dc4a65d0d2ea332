"""The list of steps against a cluster in memory, with faults put into single steps."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from headway_operator import reconcile
from headway_operator.errors import AdmissionError, UnavailableError
from headway_operator.manifests import render
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.reconcile import Carried, Outcome
from headway_operator.rollout import Rollout
from headway_operator.rollout.record import Failure
from headway_operator.spec import Service
from headway_operator.state import ChildKey, ServiceKey

Stage = Any  # of conftest.py


async def settled(stage: Stage) -> Outcome:
    for _ in range(4):
        outcome: Outcome = await stage.step()
    return outcome


async def test_a_new_service_gets_its_children_replicas_limits_and_status(stage: Stage) -> None:
    outcome = await settled(stage)
    assert outcome.problems == []
    kinds = {child.kind for child in stage.cluster.children}
    around = {"PodDisruptionBudget"}
    assert kinds == {"ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service", "Deployment", *around}
    (revision,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    assert stage.cluster.replicas[revision] == 2
    assert len(stage.scraper.state) == 2
    for state in stage.scraper.state.values():
        assert (state["max_num_seqs"], state["max_num_batched_tokens"]) == (8, 512)
        assert state["ttft_milliseconds"] == 300.0
    assert stage.condition("Ready")["status"] == "True"
    assert stage.cluster.status["observedGeneration"] == 1
    assert ("Normal", "Serving") in {event[:2] for event in stage.cluster.events}


async def test_steps_come_in_the_order_that_the_module_states(stage: Stage) -> None:
    await stage.step()
    order = [name for name, _ in itertools.groupby(call.split()[0] for call in stage.cluster.calls)]
    assert order == ["observe", "load_memory", "apply", "scale", "write_status", "emit", "save_memory"]


async def test_a_settled_service_is_left_in_peace(stage: Stage) -> None:
    await settled(stage)
    num_events, num_patches = len(stage.cluster.events), len(stage.scraper.patches)
    await stage.step()
    assert stage.cluster.named("scale") == []
    assert stage.cluster.named("prune") == []
    assert stage.cluster.named("write_status") == []
    assert stage.cluster.named("save_memory") == []
    assert (len(stage.cluster.events), len(stage.scraper.patches)) == (num_events, num_patches)


async def test_memory_is_saved_at_most_once_a_minute_and_read_once(stage: Stage) -> None:
    num_saved = num_read = 0
    for _ in range(60):
        await stage.step(5.0)
        num_saved += len(stage.cluster.named("save_memory"))
        num_read += len(stage.cluster.named("load_memory"))
    assert 2 <= num_saved <= 6
    assert num_read == 1


async def test_memories_of_many_services_are_saved_less_often(stage: Stage) -> None:
    stage.world = replace(stage.world, num_services=lambda: 1200)
    saved_at = []
    for number in range(180):
        await stage.step(5.0)
        if stage.cluster.named("save_memory"):
            saved_at.append(5.0 * number)
    assert len(saved_at) >= 2
    assert min(later - before for before, later in itertools.pairwise(saved_at[1:])) >= 300.0


async def test_an_operator_that_restarts_changes_nothing(stage: Stage) -> None:
    await settled(stage)
    children = copy.deepcopy(stage.cluster.children)
    replicas = dict(stage.cluster.replicas)
    stage.carried = Carried()
    await stage.step()
    assert stage.cluster.children == children
    assert stage.cluster.replicas == replicas
    assert stage.cluster.named("scale") == []
    assert stage.cluster.named("emit") == []


async def test_a_checkpoint_older_than_the_last_decision_undoes_nothing(stage: Stage) -> None:
    await settled(stage)
    (revision,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    assert stage.cluster.memory is not None
    assert (stage.cluster.memory["replicas"], stage.cluster.memory["limits"]) == (2, [8, 512])
    # What the operator decided after the checkpoint, before it ended.
    stage.cluster.replicas[revision] = 3
    later = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "ttft_milliseconds": 300.0}
    stage.scraper.state = {f"http://{revision}-{number}:8000": dict(later) for number in range(3)}
    stage.carried = Carried()
    await stage.step()
    assert stage.cluster.replicas[revision] == 3
    assert list(stage.scraper.state.values()) == [later] * 3


async def test_an_edited_slo_reaches_replicas_without_another_revision(stage: Stage) -> None:
    await settled(stage)
    names = set(stage.cluster.replicas)
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.manifest["metadata"]["generation"] = 2
    await settled(stage)
    assert set(stage.cluster.replicas) == names
    assert {state["ttft_milliseconds"] for state in stage.scraper.state.values()} == {450.0}
    assert stage.cluster.status["observedGeneration"] == 2


async def test_another_model_replaces_the_revision_and_prunes_the_old_one(stage: Stage) -> None:
    await settled(stage)
    (before,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    stage.manifest["spec"]["model"]["maxModelLen"] = 1024
    for _ in range(3):
        await settled(stage)
    deployments = {child.name for child in stage.cluster.children if child.kind == "Deployment"}
    assert len(deployments) == 2
    assert before not in deployments


def ask_the_impossible(stage: Stage) -> None:
    """More GPUs a replica than it has."""
    stage.manifest = copy.deepcopy(stage.manifest)
    stage.manifest["spec"]["tensorParallelSize"] = 4
    stage.manifest["spec"]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    stage.manifest["metadata"]["generation"] = 2


async def test_a_first_spec_that_cannot_be_honoured_is_told_and_that_is_all(stage: Stage) -> None:
    ask_the_impossible(stage)
    outcome = await stage.step()
    assert outcome.problems[0][0] == "read"
    assert stage.condition("Ready")["reason"] == "InvalidSpec"
    assert "spec.tensorParallelSize=4" in stage.condition("Ready")["message"]
    assert stage.cluster.children == {}
    assert ("Warning", "InvalidSpec") in {event[:2] for event in stage.cluster.events}


@pytest.mark.parametrize("is_restarted", [False, True], ids=["the same operator", "another one"])
async def test_a_refused_edit_leaves_the_accepted_spec_in_force(stage: Stage, *, is_restarted: bool) -> None:
    await settled(stage)
    ready = dict(stage.condition("Ready"))
    ask_the_impossible(stage)
    if is_restarted:
        stage.carried = Carried()
    outcome = await stage.step()
    assert outcome.problems[0][0] == "read"
    degraded = stage.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "spec.tensorParallelSize=4" in degraded["message"]
    assert degraded["message"].endswith("; generation 1 of the spec stays in force")
    assert ("Warning", "InvalidSpec") in {event[:2] for event in stage.cluster.events}
    assert stage.cluster.status["observedGeneration"] == degraded["observedGeneration"] == 2
    assert stage.condition("Ready") == ready, "of generation 1, so that nobody takes it for the new one's"
    # It is not frozen: drift is repaired, and replicas follow what is measured.
    gone = ChildKey("Service", "demo")
    del stage.cluster.children[gone]
    await stage.step()
    assert gone in stage.cluster.children
    assert outcome.decision is not None
    assert outcome.decision.replicas == 2
    assert stage.cluster.named("scale") == []
    ask = stage.manifest["spec"]
    del ask["tensorParallelSize"], ask["resources"]
    stage.manifest["metadata"]["generation"] = 3
    await settled(stage)
    assert stage.condition("Degraded")["status"] == "False"
    assert stage.condition("Ready")["observedGeneration"] == 3


async def test_a_refused_spec_is_told_apart_from_failures_of_the_operator(stage: Stage) -> None:
    metrics = OperatorMetrics()
    metrics.passed(await settled(stage), 0.01)
    ask_the_impossible(stage)
    metrics.passed(await stage.step(), 0.01)
    page = generate_latest(metrics.registry).decode()
    assert 'headway_operator_spec_refused{name="demo",namespace="default"} 1.0' in page
    assert "headway_operator_reconcile_errors_total{" not in page


BROKEN = "'str' object has no attribute 'get'"


def break_rendering(monkeypatch: pytest.MonkeyPatch, drain_timeout_seconds: int) -> None:
    """A defect of the operator over each service with such a spec."""

    def broken(service: Service, *rest: Any) -> Any:
        if service.spec.drain_timeout_seconds == drain_timeout_seconds:
            raise AttributeError(BROKEN)
        return render(service, *rest)

    monkeypatch.setattr(reconcile, "render", broken)


async def test_a_defect_over_an_edit_is_told_and_the_accepted_spec_stays_in_force(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await settled(stage)
    ready, metrics = dict(stage.condition("Ready")), OperatorMetrics()
    break_rendering(monkeypatch, 7)
    stage.manifest = copy.deepcopy(stage.manifest)
    stage.manifest["spec"]["drainTimeoutSeconds"] = 7
    stage.manifest["metadata"]["generation"] = 2
    gone = ChildKey("Service", "demo")
    for _ in range(3):
        stage.cluster.children.pop(gone, None)
        metrics.passed(await stage.step(), 0.01)
        assert gone in stage.cluster.children, "drift is repaired by the spec before"
    degraded = stage.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InternalError")
    assert f"AttributeError: {BROKEN}" in degraded["message"]
    assert degraded["message"].endswith("; generation 1 of the spec stays in force")
    assert stage.condition("Ready") == ready
    assert ("Warning", "InternalError") in {event[:2] for event in stage.cluster.events}
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert said.exc_info is not None
    assert isinstance(said.exc_info[1].__cause__ if said.exc_info[1] else None, AttributeError)
    page = generate_latest(metrics.registry).decode()
    labels = 'name="demo",namespace="default"'
    assert f'headway_operator_reconcile_errors_total{{{labels},reason="render"}} 3.0' in page
    assert f"headway_operator_spec_refused{{{labels}}} 0.0" in page
    stage.manifest["spec"]["drainTimeoutSeconds"] = 8
    stage.manifest["metadata"]["generation"] = 3
    await settled(stage)
    assert stage.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("has_served", [False, True], ids=["a new service", "a newer operator"])
async def test_a_defect_over_the_only_spec_there_is_is_told_and_changes_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, has_served: bool
) -> None:
    stage.manifest["spec"]["drainTimeoutSeconds"] = 7
    if has_served:
        await settled(stage)
    children = copy.deepcopy(stage.cluster.children)
    break_rendering(monkeypatch, 7)
    stage.carried = Carried()
    await stage.step()
    for condition in ("Ready", "Degraded"):
        assert stage.condition(condition)["reason"] == "InternalError"
        assert BROKEN in stage.condition(condition)["message"]
    assert stage.cluster.children == children
    monkeypatch.undo()
    await settled(stage)
    assert (stage.told("Ready"), stage.told("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_a_defect_over_the_accepted_spec_as_well_is_told_likewise(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.manifest["spec"]["drainTimeoutSeconds"] = 7
    await settled(stage)
    ask_the_impossible(stage)
    stage.manifest["spec"]["drainTimeoutSeconds"] = 8
    break_rendering(monkeypatch, 7)
    outcome = await stage.step()
    assert [step for step, _ in outcome.problems] == ["read", "render"]
    assert stage.told("Degraded") == ("True", "InvalidSpec")


async def test_a_template_of_a_wrong_shape_is_told_with_its_field(stage: Stage) -> None:
    await settled(stage)
    stage.manifest = copy.deepcopy(stage.manifest)
    stage.manifest["spec"]["template"] = {"spec": {"securityContext": "x"}}
    stage.manifest["metadata"]["generation"] = 2
    await stage.step()
    assert stage.told("Degraded") == ("True", "InvalidSpec")
    assert stage.condition("Degraded")["message"].startswith("spec.template.spec.securityContext: 'x' is not")
    assert stage.told("Ready") == ("True", "Serving")


async def test_changes_of_replicas_and_what_keeps_from_them_are_counted(stage: Stage) -> None:
    metrics = OperatorMetrics()
    outcome = await settled(stage)
    assert outcome.decision is not None
    for replicas, blocker in ((2, ""), (3, "AtMaxReplicas"), (3, "AtMaxReplicas"), (2, "ReplicaPending")):
        decision = replace(outcome.decision, replicas=replicas, blocker=blocker)
        metrics.passed(replace(outcome, decision=decision), 0.01)
    page = generate_latest(metrics.registry).decode()
    labels = 'name="demo",namespace="default"'
    for direction in ("up", "down"):
        assert f'headway_operator_scalings_total{{direction="{direction}",{labels}}} 1.0' in page
    assert f'headway_operator_scaling_blocked{{blocker="ReplicaPending",{labels}}} 1.0' in page
    assert "AtMaxReplicas" not in page
    metrics.forget(outcome.key)
    assert 'name="demo"' not in generate_latest(metrics.registry).decode()


async def test_a_spec_is_kept_as_soon_as_it_is_accepted_and_only_for_its_own_service(stage: Stage) -> None:
    await settled(stage)
    stage.manifest = copy.deepcopy(stage.manifest)
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.manifest["metadata"]["generation"] = 2
    await stage.step()
    assert stage.cluster.memory["accepted"]["spec"]["slo"]["ttftMilliseconds"] == 450
    assert stage.cluster.memory["accepted"]["generation"] == 2
    ask_the_impossible(stage)
    stage.manifest["metadata"]["uid"] = "of-another-service-of-that-name"
    stage.carried = Carried()
    await stage.step()
    assert stage.condition("Ready")["reason"] == "InvalidSpec"


@pytest.mark.parametrize(
    "step",
    ["apply Service demo", "apply Deployment demo-gateway", "scale", "write_status", "emit", "save_memory"],
)
async def test_a_failing_step_is_recorded_stops_no_other_and_is_tried_again(stage: Stage, step: str) -> None:
    stage.cluster.faults[step] = UnavailableError(f"{step} was refused")
    outcome = await stage.step()
    assert [message for _, message in outcome.problems if f"{step} was refused" in message]
    made = {call.split()[0] for call in stage.cluster.calls}
    assert made >= {"apply", "scale", "write_status", "save_memory"}
    if step.startswith(("apply", "scale")):
        assert stage.condition("Degraded")["reason"] == "ApiUnavailable"
        assert "was refused" in stage.condition("Degraded")["message"]
    del stage.cluster.faults[step]
    outcome = await settled(stage)
    assert outcome.problems == []
    assert stage.condition("Degraded")["status"] == "False"
    assert stage.condition("Ready")["status"] == "True"


async def test_nothing_is_pruned_while_an_apply_fails(stage: Stage) -> None:
    await settled(stage)
    stray = ChildKey("ConfigMap", "demo-stray")
    stage.cluster.children[stray] = {"kind": "ConfigMap", "metadata": {"name": "demo-stray", "labels": {}}}
    stage.cluster.faults["apply ServiceAccount demo-gateway"] = UnavailableError("no")
    await stage.step()
    assert stray in stage.cluster.children
    stage.cluster.faults.clear()
    await stage.step()
    assert stray not in stage.cluster.children


async def test_without_an_observation_nothing_is_done(stage: Stage) -> None:
    await settled(stage)
    stage.cluster.faults["observe"] = UnavailableError("the API server is away")
    with pytest.raises(UnavailableError):
        await stage.step()
    assert stage.cluster.calls == ["observe"]


async def test_an_unreadable_checkpoint_costs_the_memory_and_no_more(stage: Stage) -> None:
    stage.cluster.memory = {"version": 1, "slices": "nonsense"}
    outcome = await settled(stage)
    assert outcome.problems == []
    assert stage.condition("Ready")["status"] == "True"


async def test_a_revision_that_is_refused_leaves_the_load_to_the_one_that_serves(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.manifest["spec"]["replicas"] = 2
    await settled(stage)
    ((stable, _),) = stage.runtime().items()
    known, apply = set(stage.cluster.children), stage.cluster.apply

    async def refusing(key: ServiceKey, manifest: dict[str, Any]) -> None:
        if (
            manifest["kind"] == "Deployment"
            and ChildKey("Deployment", manifest["metadata"]["name"]) not in known
        ):
            raise AdmissionError("422: spec.template.spec.nodeSelector: Invalid value")
        await apply(key, manifest)

    monkeypatch.setattr(stage.cluster, "apply", refusing)
    stage.manifest["spec"] |= {"dtype": "float32", "replicas": 5}
    stage.manifest["metadata"]["generation"] = 2
    await settled(stage)
    assert stage.runtime() == {stable: 5}
    assert stage.told("Degraded") == ("True", "AdmissionRefused")
    assert stage.told("Progressing")[0] == "False"
    assert "nodeSelector" in stage.condition("Progressing")["message"]

    monkeypatch.undo()
    await settled(stage)
    (new,) = (name for name, count in stage.runtime().items() if count and name != stable)
    assert stage.runtime()[new] == 5


async def test_a_replica_that_refuses_its_limits_is_reported_and_patched_again(stage: Stage) -> None:
    await settled(stage)
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.scraper.refuses = True
    outcome = await stage.step()
    assert [step for step, _ in outcome.problems] == [
        f"patch limits of {name}" for name in sorted(outcome.sample.replicas if outcome.sample else {})
    ]
    assert stage.condition("Degraded")["reason"] == "StepFailed"
    stage.scraper.refuses = False
    outcome = await stage.step()
    assert outcome.problems == []


async def test_a_problem_that_stays_is_logged_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.cluster.faults["apply Service demo"] = UnavailableError("the webhook is away")
    for _ in range(3):
        outcome = await stage.step()
        assert len(outcome.problems) == 1
    stage.cluster.faults.clear()
    await stage.step()
    stage.cluster.faults["apply Service demo"] = UnavailableError("the webhook is away")
    await stage.step()
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in said] == [
        "default/demo: apply Service demo failed and is tried again: the webhook is away"
    ] * 2


async def test_nothing_new_is_served_before_it_is_verified(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    outcome = await settled(stage)
    assert outcome.problems == []
    assert stage.runtime() == {}
    assert (stage.told("QualityVerified"), stage.told("Ready")) == (
        ("Unknown", "Verifying"),
        ("False", "VerifyingQuality"),
    )
    assert stage.cluster.replicas["demo-gateway"] == 1  # who asks now is told that nothing serves yet
    assert "RevisionMade" not in {event[1] for event in stage.cluster.events}
    stage.end()
    await settled(stage)
    (first,) = stage.runtime()
    assert stage.runtime() == {first: 2}
    assert (stage.told("QualityVerified"), stage.told("Ready")) == (("True", "Passed"), ("True", "Serving"))
    assert stage.cluster.status["quality"]["checks"][0]["value"] == 0.0002
    assert [event[:2] for event in stage.cluster.events].count(("Normal", "RevisionMade")) == 1

    # A change that fails: what serves is scaled and patched on, and nothing of the change is made.
    stage.manifest["spec"]["quantization"] = "fp8"
    stage.manifest["metadata"]["generation"] = 2
    await settled(stage)
    assert (stage.runtime(), stage.told("Progressing")) == ({first: 2}, ("True", "VerifyingQuality"))
    stage.end(0.3)
    await settled(stage)
    assert stage.told("QualityVerified") == ("False", "Failed")
    assert stage.told("Progressing") == ("False", "QualityFailed")
    assert stage.told("Degraded") == ("True", "QualityFailed")
    assert stage.told("Ready") == ("True", "Serving")
    assert stage.cluster.status["observedGeneration"] == 2
    stage.manifest["spec"] |= {
        "scaling": {"minReplicas": 3, "maxReplicas": 4},
        "slo": {"ttftMilliseconds": 450},
    }
    await settled(stage)
    assert stage.runtime() == {first: 3}
    assert {state["ttft_milliseconds"] for state in stage.scraper.state.values()} == {450.0}

    # Back to what was verified: at once, with no other evaluation.
    stage.manifest["spec"]["quantization"] = "int8"
    await stage.step()
    assert stage.told("QualityVerified") == ("True", "Passed")
    assert all(one.phase == "ended" for one in stage.cluster.evaluations.values())
    kinds = [event[:2] for event in stage.cluster.events if event[1] in ("Verifying", "Passed", "Failed")]
    assert kinds == [
        ("Normal", "Verifying"),
        ("Normal", "Passed"),
        ("Normal", "Verifying"),
        ("Warning", "Failed"),
        ("Normal", "Passed"),
    ]


async def test_a_verified_change_rolls_out_and_its_job_is_all_that_is_kept(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await settled(stage)
    stage.end()
    await settled(stage)
    (first,) = stage.runtime()
    stage.manifest["spec"]["quantization"] = "fp8"
    await settled(stage)
    job = stage.end()
    for _ in range(3):
        await settled(stage)
    (second,) = stage.runtime()
    assert second != first
    assert [child.name for child in stage.cluster.children if child.kind == "Job"] == [job]
    assert stage.told("Progressing") == ("False", "Settled")


async def test_an_operator_that_restarts_judges_nothing_anew(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await settled(stage)
    stage.carried = Carried()
    await settled(stage)
    assert len(stage.cluster.evaluations) == 1  # it found the one that runs
    stage.end(0.3)
    stage.carried = Carried()
    await settled(stage)
    for child in [child for child in stage.cluster.children if child.kind == "Job"]:
        await stage.cluster.prune(ServiceKey("default", "demo"), child)
    stage.carried = Carried()
    stage.world = replace(stage.world)
    await settled(stage)
    assert (stage.cluster.evaluations, stage.told("QualityVerified")) == ({}, ("False", "Failed"))
    assert stage.runtime() == {}


async def test_a_newer_operator_judges_nothing_anew_and_holds_nothing_back(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await settled(stage)
    stage.end()
    await settled(stage)
    before = stage.runtime()
    stage.cluster.site = replace(stage.cluster.site, runtime_image="runtime:2", gateway_image="gateway:2")
    await settled(stage)
    assert (stage.runtime(), stage.told("QualityVerified")) == (before, ("True", "Passed"))
    assert len(stage.cluster.evaluations) == 1
    # An edit brings the newer image along, which nobody has judged.
    stage.manifest["spec"]["drainTimeoutSeconds"] = 5
    await settled(stage)
    assert (stage.runtime(), stage.told("Progressing")) == (before, ("True", "VerifyingQuality"))


async def test_a_changed_file_is_judged_anew_while_the_service_serves(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {"text": "configmap://judge/a"}}
    await settled(stage)
    assert stage.told("QualityVerified") == ("Unknown", "FileMissing")
    assert (stage.cluster.evaluations, stage.told("Degraded")) == ({}, ("True", "QualityFileMissing"))
    stage.cluster.files["configmap://judge/a"] = "1"
    await settled(stage)
    stage.end()
    await settled(stage)
    before = stage.runtime()
    stage.cluster.files["configmap://judge/a"] = "2"
    await settled(stage)
    stage.end(0.3)
    await settled(stage)
    assert (stage.told("QualityVerified"), stage.told("Ready")) == (("False", "Failed"), ("True", "Serving"))
    assert stage.runtime() == before
    assert "withheld" not in stage.cluster.status["quality"]


async def test_without_the_gate_what_was_withheld_is_served(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await settled(stage)
    stage.end(0.3)
    await settled(stage)
    assert stage.runtime() == {}
    del stage.manifest["spec"]["quality"]
    await settled(stage)
    assert list(stage.runtime().values()) == [2]
    assert stage.cluster.evaluations == {}
    assert "quality" not in stage.cluster.status
    assert "QualityVerified" not in {one["type"] for one in stage.cluster.status["conditions"]}


async def test_scaled_to_zero_nothing_is_judged_until_it_is_raised(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}, "replicas": 0}
    await settled(stage)
    assert (stage.cluster.evaluations, stage.told("QualityVerified")) == ({}, ("Unknown", "ScaledToZero"))
    assert stage.told("Ready") == ("False", "ScaledToZero")
    stage.manifest["spec"]["replicas"] = 1
    await settled(stage)
    assert stage.told("QualityVerified") == ("Unknown", "Verifying")


async def test_the_gate_shows_in_the_operators_metrics(stage: Stage) -> None:
    metrics, where = OperatorMetrics(), 'name="demo",namespace="default"'

    async def page() -> str:
        metrics.passed(await stage.step(), 0.1)
        return generate_latest(metrics.registry).decode()

    assert "quality_verified{" not in await page()
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    assert f"headway_operator_quality_verified{{{where}}} 0.0" in await page()
    await stage.step()
    stage.end()
    for text in (await page(), await page()):
        assert f"headway_operator_quality_verified{{{where}}} 1.0" in text
        assert f'headway_operator_quality_judgements_total{{{where},reason="Passed"}} 1.0' in text
        check = f'check="mean KL divergence",{where}'
        assert f"headway_operator_quality_measured{{{check}}} 0.0002" in text
        assert f"headway_operator_quality_limit{{{check}}} 0.01" in text
    del stage.manifest["spec"]["quality"]
    text = await page()
    assert "quality_measured{" not in text
    assert "quality_verified{" not in text
    metrics.forget(ServiceKey("default", "demo"))
    assert "replicas_wanted{" not in generate_latest(metrics.registry).decode()


async def test_a_suspended_service_ends_its_evaluation_and_takes_it_up_again(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await settled(stage)
    assert [one.phase for one in stage.cluster.evaluations.values()] == ["running"]
    stage.manifest["spec"]["suspend"] = True
    await settled(stage)
    assert stage.cluster.evaluations == {}
    assert stage.told("QualityVerified") == ("Unknown", "Suspended")
    assert (stage.told("Ready"), stage.told("Progressing")) == (
        ("False", "Suspended"),
        ("False", "Suspended"),
    )
    del stage.manifest["spec"]["suspend"]
    await settled(stage)
    assert stage.told("QualityVerified") == ("Unknown", "Verifying")
    stage.end()
    await settled(stage)
    assert list(stage.runtime().values()) == [2]


async def test_rollouts_show_in_the_operators_metrics(stage: Stage) -> None:
    metrics, where = OperatorMetrics(), 'name="demo",namespace="default"'
    outcome = await settled(stage)
    assert outcome.rollout is not None
    failed = Failure("demo-0ld", "spec", "CanaryErrors", "5 of 9 failed", "2026-01-02T03:04:05Z")
    for record, weight, given_up in (
        (outcome.rollout.record, 0.0, 0.0),
        (msgspec.structs.replace(outcome.rollout.record, candidate="demo-new", weight=25), 25.0, 0.0),
        (msgspec.structs.replace(outcome.rollout.record, failed=failed), 0.0, 1.0),
    ):
        outcome.rollout = Rollout(record)
        metrics.passed(outcome, 0.1)
        page = generate_latest(metrics.registry).decode()
        assert f"headway_operator_canary_weight{{{where}}} {weight}" in page
        assert f"headway_operator_rollout_given_up{{{where}}} {given_up}" in page

"""Specs that cannot be honoured, and those over which the operator itself fails."""

import copy
from typing import Any

import pytest
from prometheus_client import generate_latest

from headway_operator import conditions, reconcile
from headway_operator.manifests import render
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Carried
from headway_operator.spec import Service
from headway_operator.state import ChildKey

Stage = Any  # of conftest.py


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
    await stage.settle()
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
    await stage.settle()
    assert stage.condition("Degraded")["status"] == "False"
    assert stage.condition("Ready")["observedGeneration"] == 3


async def test_a_refused_spec_is_told_apart_from_failures_of_the_operator(stage: Stage) -> None:
    metrics = OperatorMetrics()
    metrics.passed(await stage.settle(), 0.01)
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
    await stage.settle()
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
    assert (
        f'headway_operator_reconcile_errors_total{{{labels},reason="InternalError",step="render"}} 3.0'
        in page
    )
    assert f"headway_operator_spec_refused{{{labels}}} 0.0" in page
    stage.manifest["spec"]["drainTimeoutSeconds"] = 8
    stage.manifest["metadata"]["generation"] = 3
    await stage.settle()
    assert stage.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("has_served", [False, True], ids=["a new service", "a newer operator"])
async def test_a_defect_over_the_only_spec_there_is_is_told_and_changes_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, has_served: bool
) -> None:
    stage.manifest["spec"]["drainTimeoutSeconds"] = 7
    if has_served:
        await stage.settle()
    children = copy.deepcopy(stage.cluster.children)
    break_rendering(monkeypatch, 7)
    stage.carried = Carried()
    await stage.step()
    for condition in ("Ready", "Degraded"):
        assert stage.condition(condition)["reason"] == "InternalError"
        assert BROKEN in stage.condition(condition)["message"]
    assert stage.cluster.children == children
    monkeypatch.undo()
    await stage.settle()
    assert (stage.told("Ready"), stage.told("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_a_defect_over_the_accepted_spec_as_well_is_told_likewise(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.manifest["spec"]["drainTimeoutSeconds"] = 7
    await stage.settle()
    ask_the_impossible(stage)
    stage.manifest["spec"]["drainTimeoutSeconds"] = 8
    break_rendering(monkeypatch, 7)
    outcome = await stage.step()
    assert [one.step for one in outcome.problems] == ["read", "render"]
    assert stage.told("Degraded") == ("True", "InvalidSpec")


@pytest.mark.parametrize("step", ["decide", "follow", "plan", "status"])
async def test_a_defect_in_deciding_is_told_and_changes_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    await stage.settle()
    ready, metrics = dict(stage.condition("Ready")), OperatorMetrics()
    children = copy.deepcopy(stage.cluster.children)

    def broken(*_: Any) -> Any:
        raise AttributeError(BROKEN)

    if step == "status":
        monkeypatch.setattr(conditions, "status", broken)
    else:
        monkeypatch.setattr(reconcile, step, broken)
    for _ in range(3):
        metrics.passed(await stage.step(), 0.01)
    degraded = stage.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InternalError")
    assert f"AttributeError: {BROKEN}" in degraded["message"]
    assert stage.condition("Ready") == ready
    assert stage.cluster.children == children
    assert [event[:2] for event in stage.cluster.events].count(("Warning", "InternalError")) == 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    labels = 'name="demo",namespace="default"'
    where = "status" if step == "status" else "decide"
    page = generate_latest(metrics.registry).decode()
    assert (
        f'headway_operator_reconcile_errors_total{{{labels},reason="InternalError",step="{where}"}} 3.0'
        in page
    )
    monkeypatch.undo()
    await stage.settle()
    assert (stage.told("Ready"), stage.told("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_a_defect_in_the_first_decision_is_told_in_both(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError(BROKEN)

    monkeypatch.setattr(reconcile, "decide", broken)
    await stage.step()
    for condition in ("Ready", "Degraded"):
        assert stage.condition(condition)["reason"] == "InternalError"
    assert not stage.cluster.children


async def test_a_template_of_a_wrong_shape_is_told_with_its_field(stage: Stage) -> None:
    await stage.settle()
    stage.manifest = copy.deepcopy(stage.manifest)
    stage.manifest["spec"]["template"] = {"spec": {"securityContext": "x"}}
    stage.manifest["metadata"]["generation"] = 2
    await stage.step()
    assert stage.told("Degraded") == ("True", "InvalidSpec")
    assert stage.condition("Degraded")["message"].startswith("spec.template.spec.securityContext: 'x' is not")
    assert stage.told("Ready") == ("True", "Serving")


async def test_a_spec_is_kept_as_soon_as_it_is_accepted_and_only_for_its_own_service(stage: Stage) -> None:
    await stage.settle()
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

"""The list of steps against a cluster in memory, with faults put into single steps."""

import asyncio
import copy
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from headway_operator.errors import AdmissionError, OtherOperatorError, UnavailableError
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Carried
from headway_operator.rollout import Rollout
from headway_operator.rollout.record import Failure
from headway_operator.state import ChildKey, ServiceKey
from headway_operator.times import drawn_share

Stage = Any  # of conftest.py


async def test_a_new_service_gets_its_children_replicas_limits_and_status(stage: Stage) -> None:
    outcome = await stage.settle()
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
    await stage.settle()
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
    for number in range(250):
        await stage.step(5.0)
        if stage.cluster.named("save_memory"):
            saved_at.append(5.0 * number)
    assert len(saved_at) >= 2
    assert min(later - before for before, later in itertools.pairwise(saved_at[1:])) >= 300.0


def test_what_all_services_do_they_do_at_times_of_their_own() -> None:
    shares = [drawn_share(ServiceKey("team", f"service-{number}"), 1_800_000_000.0) for number in range(400)]
    tenths = Counter(int(10 * share) for share in shares)
    assert set(tenths) == set(range(10))
    assert max(tenths.values()) < 70
    assert drawn_share(ServiceKey("team", "a"), 1.0) == drawn_share(ServiceKey("team", "a"), 1.0)
    assert drawn_share(ServiceKey("team", "a"), 1.0) != drawn_share(ServiceKey("team", "a"), 2.0)


async def test_an_operator_that_restarts_changes_nothing(stage: Stage) -> None:
    await stage.settle()
    children = copy.deepcopy(stage.cluster.children)
    replicas = dict(stage.cluster.replicas)
    stage.carried = Carried()
    await stage.step()
    assert stage.cluster.children == children
    assert stage.cluster.replicas == replicas
    assert stage.cluster.named("scale") == []
    assert stage.cluster.named("emit") == []


async def test_a_checkpoint_older_than_the_last_decision_undoes_nothing(stage: Stage) -> None:
    await stage.settle()
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
    await stage.settle()
    names = set(stage.cluster.replicas)
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.manifest["metadata"]["generation"] = 2
    await stage.settle()
    assert set(stage.cluster.replicas) == names
    assert {state["ttft_milliseconds"] for state in stage.scraper.state.values()} == {450.0}
    assert stage.cluster.status["observedGeneration"] == 2


async def test_another_model_replaces_the_revision_and_prunes_the_old_one(stage: Stage) -> None:
    await stage.settle()
    (before,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    stage.manifest["spec"]["model"]["maxModelLen"] = 1024
    for _ in range(3):
        await stage.settle()
    deployments = {child.name for child in stage.cluster.children if child.kind == "Deployment"}
    assert len(deployments) == 2
    assert before not in deployments


async def test_changes_of_replicas_and_what_keeps_from_them_are_counted(stage: Stage) -> None:
    metrics = OperatorMetrics()
    outcome = await stage.settle()
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


@pytest.mark.parametrize(
    "step",
    ["apply Service demo", "apply Deployment demo-gateway", "scale", "write_status", "emit", "save_memory"],
)
async def test_a_failing_step_is_recorded_stops_no_other_and_is_tried_again(stage: Stage, step: str) -> None:
    stage.cluster.faults[step] = UnavailableError(f"{step} was refused")
    outcome = await stage.step()
    assert [one for one in outcome.problems if f"{step} was refused" in one.message]
    made = {call.split()[0] for call in stage.cluster.calls}
    assert made >= {"apply", "scale", "write_status", "save_memory"}
    if step.startswith(("apply", "scale")):
        assert stage.condition("Degraded")["reason"] == "ApiUnavailable"
        assert "was refused" in stage.condition("Degraded")["message"]
    del stage.cluster.faults[step]
    outcome = await stage.settle()
    assert outcome.problems == []
    assert stage.condition("Degraded")["status"] == "False"
    assert stage.condition("Ready")["status"] == "True"


async def test_nothing_is_pruned_while_an_apply_fails(stage: Stage) -> None:
    await stage.settle()
    stray = ChildKey("ConfigMap", "demo-stray")
    stage.cluster.children[stray] = {"kind": "ConfigMap", "metadata": {"name": "demo-stray", "labels": {}}}
    stage.cluster.faults["apply ServiceAccount demo-gateway"] = UnavailableError("no")
    await stage.step()
    assert stray in stage.cluster.children
    stage.cluster.faults.clear()
    await stage.step()
    assert stray not in stage.cluster.children


async def test_without_an_observation_nothing_is_done(stage: Stage) -> None:
    await stage.settle()
    stage.cluster.faults["observe"] = UnavailableError("the API server is away")
    with pytest.raises(UnavailableError):
        await stage.step()
    assert stage.cluster.calls == ["observe"]


async def test_an_unreadable_checkpoint_costs_the_memory_and_no_more(stage: Stage) -> None:
    stage.cluster.memory = {"version": 1, "slices": "nonsense"}
    outcome = await stage.settle()
    assert outcome.problems == []
    assert stage.condition("Ready")["status"] == "True"


async def test_a_revision_that_is_refused_leaves_the_load_to_the_one_that_serves(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.manifest["spec"]["replicas"] = 2
    await stage.settle()
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
    await stage.settle()
    assert stage.runtime() == {stable: 5}
    assert stage.told("Degraded") == ("True", "AdmissionRefused")
    assert stage.told("Progressing")[0] == "False"
    assert "nodeSelector" in stage.condition("Progressing")["message"]

    monkeypatch.undo()
    await stage.settle()
    (new,) = (name for name, count in stage.runtime().items() if count and name != stable)
    assert stage.runtime()[new] == 5


async def test_a_replica_that_refuses_its_limits_is_reported_and_patched_again(stage: Stage) -> None:
    await stage.settle()
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.scraper.refuses = True
    outcome = await stage.step()
    assert [one.step for one in outcome.problems] == [
        f"patch limits of {name}" for name in sorted(outcome.sample.replicas if outcome.sample else {})
    ]
    assert stage.condition("Degraded")["reason"] == "StepFailed"
    stage.scraper.refuses = False
    outcome = await stage.step()
    assert outcome.problems == []


async def test_limits_go_to_all_replicas_at_once(stage: Stage) -> None:
    """Of a hundred the ten that hang must not hold up the rest."""
    stage.manifest["spec"]["replicas"] = 8
    await stage.settle()
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.scraper.patches.clear()
    stage.scraper.together = asyncio.Barrier(8)
    async with asyncio.timeout(60):
        outcome = await stage.step()
    assert outcome.problems == []
    assert len({address for address, _ in stage.scraper.patches}) == 8


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


async def test_rollouts_show_in_the_operators_metrics(stage: Stage) -> None:
    metrics, where = OperatorMetrics(), 'name="demo",namespace="default"'
    outcome = await stage.settle()
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


async def test_what_is_kept_as_an_earlier_operator_rendered_it_is_repaired_and_not_applied(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.settle()
    assert stage.cluster.named("repair") == []
    names = sorted(stage.cluster.replicas)
    monkeypatch.setattr("headway_operator.manifests.pod.GRACE_MARGIN_SECONDS", 16)
    stage.cluster.faults[f"repair Deployment {names[0]}"] = UnavailableError("away")
    outcome = await stage.step()
    assert stage.cluster.named("repair") == [f"repair Deployment {name}" for name in names]
    assert [one for one in stage.cluster.named("apply") if "Deployment" in one] == []
    assert outcome.problems == [(f"repair Deployment {names[0]}", "away", "UnavailableError")]
    assert stage.told("Degraded") == ("True", "ApiUnavailable")


async def test_nothing_is_read_measured_or_written_while_another_operator_looks_after_it(
    stage: Stage,
) -> None:
    await stage.settle()
    sampled: list[ServiceKey] = []
    stage.scraper.sample = lambda key, observed: sampled.append(key)
    stage.cluster.faults["check_alone"] = OtherOperatorError("system", "laptop")
    for carried in (stage.carried, Carried()):  # one that wrote before, and one that has just started
        stage.carried = carried
        with pytest.raises(OtherOperatorError):
            await stage.step(1000.0)
        assert stage.cluster.calls == []
        assert sampled == []


@pytest.mark.parametrize(
    ("num_services", "interval_seconds", "period"), [(1, 5.0, 60.0), (1000, 5.0, 250.0), (1, 100.0, 100.0)]
)
async def test_a_checkpoint_that_says_nothing_new_is_renewed_before_it_counts_no_more(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    num_services: int,
    interval_seconds: float,
    period: float,
) -> None:
    stage.world = replace(stage.world, num_services=lambda: num_services, interval_seconds=interval_seconds)
    monkeypatch.setattr("headway_operator.slo.Memory.to_dict", lambda memory: {"version": 1})
    saved = []
    for _ in range(round(7 * period / interval_seconds)):
        await stage.step(interval_seconds)
        if stage.cluster.named("save_memory"):
            saved.append(stage.clock.now)
            assert stage.cluster.counts_until == stage.clock.now + 3 * period
        assert stage.clock.now < stage.cluster.counts_until
    assert {later - earlier for earlier, later in itertools.pairwise(saved)} == {2 * period}

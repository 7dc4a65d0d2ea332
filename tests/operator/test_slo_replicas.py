"""Single decisions about replicas: awaited ones, those others ask for, and what a restart knows of them."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.slo_scene import NOW, Scene

from headway_operator.samples import Limits
from headway_operator.slo import Memory


@pytest.mark.parametrize(
    ("age", "want"), [(2.0, "Settling"), (60.0, "AtMaxReplicas")], ids=["had no time yet", "had its time"]
)
def test_the_last_replica_allowed_has_its_time_before_it_is_called_too_few(
    scene: Scene, build: Any, age: float, want: str
) -> None:
    scene.target = replace(scene.target, highest=Limits(8, 512), max_replicas=2)
    scene.replicas["b"] = build.replica("b", ready_at=NOW - age, created_at=NOW - age - 10)
    scene.memory = scene.memory._replace(replicas=2)
    scene.slow_ttft()
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (2, want)


@pytest.mark.parametrize(
    ("age", "reason", "want_replicas", "want_blocker"),
    [
        pytest.param(599.0, "ImagePullBackOff", 2, "ReplicaPending", id="pending is waited for"),
        pytest.param(601.0, "ImagePullBackOff", 3, "ImagePullBackOff", id="past its deadline it is absent"),
        pytest.param(601.0, "Unschedulable", 2, "Unschedulable", id="another would find no place either"),
    ],
)
def test_replicas_asked_for(
    scene: Scene, build: Any, age: float, reason: str, want_replicas: int, want_blocker: str
) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, highest=Limits(8, 512))
    late = build.replica("b", phase="pending", ready_at=None, created_at=NOW - age, reason=reason)
    scene.replicas["b"] = late
    scene.memory = scene.memory._replace(replicas=2, replicas_raised_at=NOW - age)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (want_replicas, want_blocker)
    assert (f"is not ready yet ({reason})" in decision.message) == (want_blocker == "ReplicaPending")


def test_a_pod_that_does_not_exist_yet_is_pending_too(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = scene.memory._replace(replicas=2, replicas_raised_at=NOW - 20)
    scene.target = replace(scene.target, highest=Limits(8, 512))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (2, "ReplicaPending")


def test_fixed_replicas_move_limits_only(scene: Scene) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, fixed_replicas=1)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.blocker) == (1, Limits(32, 512), "FixedReplicas")


def test_another_scaler_keeps_its_replicas(scene: Scene, build: Any) -> None:
    scene.slow_ttft()
    scene.other_scaler = "HorizontalPodAutoscaler/demo"
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (2, "OtherScaler")


def test_without_samples_of_half_the_replicas_everything_holds(scene: Scene) -> None:
    scene.slow_ttft()
    scene.samples = {"a": None}
    scene.errors = {"a": "no answer within 2 s"}
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (1, Limits(8, 512))
    assert (decision.cause, decision.blocker) == ("HoldingWithoutSamples", "SamplesMissing")
    assert "1 of 1 ready replicas give no usable sample: no answer within 2 s" in decision.message


def test_a_restart_forgets_that_fewer_would_do_and_nothing_else(scene: Scene) -> None:
    scene.slow_ttft()
    _, memory = scene.decide()
    assert memory.watched_since == NOW
    memory = memory._replace(removed_at=NOW - 5.0, removed_from=3, factors_at=NOW - 1.0)
    restored = Memory.from_dict(memory.to_dict(), NOW)
    assert restored == memory._replace(watched_since=None, marks=())


def test_another_version_of_memory_is_a_fresh_one() -> None:
    assert Memory.from_dict({"version": 99}, NOW) == Memory(began_at=NOW)
    assert Memory.from_dict(None, NOW) == Memory(began_at=NOW)


def test_without_memory_the_world_is_taken_as_it_is(scene: Scene, build: Any) -> None:
    scene.memory = Memory.from_dict(None, NOW)
    scene.replicas |= {"b": build.replica("b"), "c": build.replica("c")}
    scene.samples = {name: build.sample(NOW, limits=Limits(16, 1024)) for name in scene.replicas}
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (3, Limits(16, 1024))


def test_a_service_at_zero_waits_for_nobody(scene: Scene) -> None:
    scene.target = replace(scene.target, fixed_replicas=0)
    scene.replicas, scene.samples = {}, {}
    scene.memory = scene.memory._replace(replicas=0)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (0, "ScaledToZero")


@pytest.mark.parametrize(
    ("seconds_ready", "want_replicas", "want_blocker"),
    [(9.0, 2, "Settling"), (10.0, 3, "")],
    ids=["the newest replica has not acted yet", "the newest replica has acted"],
)
def test_a_new_replica_is_given_time_to_act(
    scene: Scene, build: Any, seconds_ready: float, want_replicas: int, want_blocker: str
) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, highest=Limits(8, 512))
    scene.replicas["b"] = build.replica("b", ready_at=NOW - seconds_ready)
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = scene.memory._replace(replicas=2)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (want_replicas, want_blocker)

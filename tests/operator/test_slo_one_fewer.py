"""Single decisions about one replica fewer: after how long, and what forbids it."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.slo_scene import NOW, Scene

from headway_operator.samples import GatewaySample, Limits
from headway_operator.slo.memory import Recommended


def watching(scene: Scene, build: Any, seconds: float, *recommended: Recommended) -> None:
    """Two replicas that have been watched for so long, and what was recommended meanwhile."""
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = scene.memory._replace(replicas=2, watched_since=NOW - seconds, recommended=recommended)


@pytest.mark.parametrize(("seconds", "want"), [(119.0, 2), (120.0, 1)])
def test_one_fewer_waits_for_two_start_up_times(scene: Scene, build: Any, seconds: float, want: int) -> None:
    """As long as nothing was learnt, a start is taken to last a minute."""
    watching(scene, build, seconds)
    decision, memory = scene.decide()
    assert decision.replicas == want
    assert decision.cause == ("Stabilizing" if want == 2 else "RemovedReplica")
    assert memory.replicas_lowered_at == (None if want == 2 else NOW)


def test_one_fewer_waits_for_the_stabilization_time_where_that_is_longer(scene: Scene, build: Any) -> None:
    scene.target = replace(scene.target, stabilization_seconds=400.0)
    watching(scene, build, 399.0)
    assert scene.decide()[0].replicas == 2
    watching(scene, build, 400.0)
    assert scene.decide()[0].replicas == 1


def test_a_start_that_lasts_longer_is_looked_back_on_for_longer(scene: Scene, build: Any) -> None:
    watching(scene, build, 200.0)
    scene.memory = scene.memory._replace(starts=((NOW - 5000, 110.0),))
    assert scene.decide()[0].replicas == 2
    scene.memory = scene.memory._replace(starts=((NOW - 5000, 90.0),))
    assert scene.decide()[0].replicas == 1


def test_the_highest_recommendation_of_the_time_looked_back_keeps_its_replicas(
    scene: Scene, build: Any
) -> None:
    watching(scene, build, 500.0, Recommended(NOW - 110.0, 2), Recommended(NOW - 50.0, 1))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (2, "Stabilizing")
    assert "1 replicas would do, 2 would not have over the last 120 s" in decision.message
    watching(scene, build, 500.0, Recommended(NOW - 130.0, 2), Recommended(NOW - 50.0, 1))
    assert scene.decide()[0].replicas == 1


def test_without_a_model_nobody_knows_of_room_after_a_regret(scene: Scene, build: Any) -> None:
    watching(scene, build, 359.0, Recommended(NOW - 300.0, 2), Recommended(NOW - 50.0, 1))
    scene.memory = scene.memory._replace(patience=3.0, patience_at=NOW - 400.0)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (2, "Stabilizing")
    assert "room" not in decision.message
    watching(scene, build, 360.0, Recommended(NOW - 361.0, 2), Recommended(NOW - 50.0, 1))
    assert scene.decide()[0].replicas == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"running": 4}, id="too many run for one replica"),
        pytest.param({"kv_blocks_used": 500}, id="kv memory would be short"),
        pytest.param({"waiting": 3, "oldest_waiting_seconds": 0.4}, id="a request waits for too long"),
        pytest.param({"taken_at": NOW - 30}, id="samples are stale"),
    ],
)
def test_one_fewer_is_not_enough(scene: Scene, build: Any, change: dict[str, Any]) -> None:
    watching(scene, build, 500.0)
    assert scene.decide()[0].replicas == 1
    scene.sample(**change)
    decision, memory = scene.decide()
    assert decision.replicas == 2
    assert memory.recommended[-1] == Recommended(NOW, 2)


def test_nothing_is_removed_while_the_gateway_keeps_its_queue_to_itself(scene: Scene, build: Any) -> None:
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = scene.memory._replace(replicas=2, watched_since=NOW - 500)
    scene.gateways = {"gateway": None}
    assert scene.decide()[0].replicas == 2
    scene.gateways = {"gateway": GatewaySample("g", NOW, 0, 0.0, 0, {})}
    assert scene.decide()[0].replicas == 1


def test_of_fixed_replicas_no_fewer_are_recommended(scene: Scene, build: Any) -> None:
    watching(scene, build, 500.0)
    scene.target = replace(scene.target, fixed_replicas=2)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.evidence["recommended_replicas"]) == (2, 2)
    assert "would do" not in decision.message

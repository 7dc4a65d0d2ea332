"""What the status says of the controller's decisions: the last one, those before it, and its advice."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.service_world import KEY, NOW, STEADY, World

from headway_operator import conditions
from headway_operator.spec import InferenceServiceStatus


@pytest.fixture
def world(build: Any) -> World:
    return World(build)


def test_a_decision_says_what_the_load_asks_for_and_since_when_it_stands(world: World) -> None:
    def pass_at(at: float, **changes: Any) -> dict[str, Any]:
        world.decision = replace(STEADY, at=at, **changes)
        world.previous = world.status(at)
        last: dict[str, Any] = world.previous["lastDecision"]
        return last

    assert "candidateReplicas" not in pass_at(NOW, evidence={})
    blocked: dict[str, Any] = {"blocker": "AtMaxReplicas", "evidence": {"recommended_replicas": 5}}
    first = pass_at(NOW + 5, **blocked)
    assert (first["replicas"], first["candidateReplicas"], first["since"]) == (2, 5, "2027-01-15T08:00:05Z")
    later = pass_at(NOW + 10, **(blocked | {"evidence": {"recommended_replicas": 6}}))
    assert (later["time"], later["since"]) == ("2027-01-15T08:00:10Z", "2027-01-15T08:00:05Z")
    assert later["candidateReplicas"] == 6
    assert pass_at(NOW + 15)["since"] == "2027-01-15T08:00:15Z"


def test_the_last_decisions_that_differ_are_in_the_status(world: World) -> None:
    def pass_at(seconds: int, **changes: Any) -> list[dict[str, Any]]:
        world.decision = replace(STEADY, at=NOW + seconds, **changes)
        world.previous = world.status(NOW + seconds)
        InferenceServiceStatus.model_validate(world.previous)
        earlier: list[dict[str, Any]] = world.previous.get("earlierDecisions", [])
        return earlier

    assert pass_at(0, message="calm") == []
    assert pass_at(5, message="still calm") == []
    [first] = pass_at(10, cause="AddedReplicas", replicas=3)
    assert (first["cause"], first["message"], first["since"]) == (
        "Steady",
        "still calm",
        "2027-01-15T08:00:00Z",
    )
    assert first["time"] == "2027-01-15T08:00:05Z"
    for count in range(10):
        earlier = pass_at(15 + 5 * count, replicas=4 + count)
    assert [one["replicas"] for one in earlier] == [12, 11, 10, 9, 8], "the latest first, and no more"


def test_advice_is_in_the_status_and_told_once(world: World) -> None:
    calm = world.status(NOW)
    assert "recommendation" not in calm
    world.previous = calm
    world.decision = replace(
        STEADY, advice="prefill alone takes 640 ms: fp8 weights would be predicted at 384"
    )
    advised = world.status(NOW + 5)
    assert advised["recommendation"] == world.decision.advice
    InferenceServiceStatus.model_validate(advised)
    told = ("Warning", "Recommendation", world.decision.advice)
    assert told in conditions.events(calm, advised)
    assert conditions.worth_writing(KEY, calm, advised, NOW + 5)
    world.previous = advised
    world.decision = replace(
        world.decision, advice="prefill alone takes 650 ms: fp8 weights would be predicted"
    )
    moved = world.status(NOW + 10)
    assert moved["recommendation"] == world.decision.advice
    assert not [one for one in conditions.events(advised, moved) if one[1] == "Recommendation"]

"""When a status is written: at once for what lasts, now and then for what moves."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.service_world import KEY, MET, NOW, STEADY, VIOLATED, World

from headway_operator import conditions
from headway_operator.names import ServiceKey
from headway_operator.samples import Limits


@pytest.fixture
def world(build: Any) -> World:
    return World(build)


def test_of_which_nothing_moves_is_written_every_ten_minutes(world: World) -> None:
    first = world.status(NOW)
    world.previous = first
    assert not conditions.worth_writing(KEY, first, world.status(NOW + 299), NOW + 299)
    assert conditions.worth_writing(KEY, first, world.status(NOW + 600), NOW + 600)


def test_is_written_on_change_and_soon_but_not_at_once_for_a_new_number(world: World) -> None:
    first = world.status(NOW)
    assert conditions.worth_writing(KEY, {}, first, NOW)
    world.previous = first
    moved = replace(MET, p_milliseconds=250.0, met=490)
    world.decision = replace(STEADY, at=NOW + 5, message="P95 TTFT 250 ms against 300 ms", ttft=moved)
    second = world.status(NOW + 5)
    assert second != first
    assert not conditions.worth_writing(KEY, first, second, NOW + 5)
    assert not conditions.worth_writing(KEY, first, world.status(NOW + 44), NOW + 44)
    assert conditions.worth_writing(KEY, first, world.status(NOW + 90), NOW + 90)


def test_of_many_services_numbers_are_written_less_often(world: World) -> None:
    first = world.status(NOW)
    world.previous = first
    world.decision = replace(STEADY, message="P95 TTFT 250 ms against 300 ms")
    second = world.status(NOW + 1)
    assert conditions.worth_writing(KEY, first, second, NOW + 90, num_services=360)
    assert not conditions.worth_writing(KEY, first, second, NOW + 124, num_services=1000)
    assert conditions.worth_writing(KEY, first, second, NOW + 250, num_services=1000)


def test_those_that_were_written_at_once_are_not_written_at_once_again(world: World) -> None:
    first = world.status(NOW)
    world.previous = first
    world.decision = replace(STEADY, message="P95 TTFT 250 ms against 300 ms")
    second = world.status(NOW + 1)
    keys = [ServiceKey("team", f"service-{number}") for number in range(400)]

    def written(seconds: float) -> int:
        return sum(conditions.worth_writing(key, first, second, NOW + seconds) for key in keys)

    each_second = [written(45 + second) - written(44 + second) for second in range(46)]
    assert sum(each_second) == len(keys)
    assert max(each_second) < len(keys) / 45 * 3


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"limits": Limits(16, 512)}, id="limits decided"),
        pytest.param({"replicas": 3}, id="replicas decided"),
        pytest.param({"cause": "Stabilizing"}, id="cause"),
        pytest.param({"ttft": VIOLATED}, id="verdict"),
        pytest.param({"ttft": replace(MET, target_milliseconds=200.0)}, id="target"),
        pytest.param({"blocker": "SamplesMissing"}, id="blocker"),
    ],
)
def test_is_written_for_what_lasts(world: World, change: dict[str, Any]) -> None:
    first = world.status(NOW)
    world.decision = replace(STEADY, **change)
    assert conditions.worth_writing(KEY, first, world.status(NOW + 1), NOW + 1)


def test_a_candidate_that_moves_is_no_cause_to_write(world: World) -> None:
    world.decision = replace(STEADY, evidence={"recommended_replicas": 3})
    world.previous = world.status(NOW)
    world.decision = replace(STEADY, evidence={"recommended_replicas": 4})
    assert not conditions.worth_writing(KEY, world.previous, world.status(NOW + 1), NOW + 1)

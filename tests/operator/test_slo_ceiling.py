"""The most that replicas are seen to do: what a crowd shows, when it shows nothing, how long it holds."""

import json
from dataclasses import replace
from math import inf

import pytest
from tests.operator.law_fleet import BEST, CAPACITY, NOW, Fleet

from headway_operator.slo import Memory
from headway_operator.slo.capacity import Workload
from headway_operator.slo.ceiling import Ceiling


@pytest.fixture
def crowded(fleet: Fleet) -> Fleet:
    """Four replicas that are thought to do 6.06 requests a second, do 5 of the 20 that come, and have had a
    queue that is late for a minute."""
    fleet.counted = 100
    fleet.gauges |= {"waiting": 20, "oldest_waiting_seconds": 2.0}
    fleet.memory = replace(fleet.memory, crowded_since=NOW - 60.0, kappa_at=NOW - 5.0)
    return fleet


def test_replicas_are_thought_to_do_no_more_than_they_did_in_a_crowd(crowded: Fleet) -> None:
    first, memory = crowded.decide()
    assert first.replicas == 4
    assert memory.ceiling is not None
    assert memory.ceiling.per_second == pytest.approx(5.0)
    crowded.memory = replace(crowded.memory, ceiling=memory.ceiling)
    decision, memory = crowded.decide()
    assert decision.evidence["bound_per_second"] == pytest.approx(5.0)
    assert (decision.cause, decision.replicas) == ("AddedReplicas", 5)
    assert memory.kappa == 1.0


def test_fewer_places_than_the_best_show_less_than_a_replica_can_do(crowded: Fleet) -> None:
    few = replace(BEST, max_num_seqs=30)
    crowded.gauges["limits"] = few
    crowded.memory = replace(crowded.memory, limits=few, limits_changed_at=NOW - 300.0)
    ceiling = crowded.decide()[1].ceiling
    assert ceiling is not None
    assert ceiling.per_second == pytest.approx(5.0 * 33 / 30)


@pytest.mark.parametrize(
    "case",
    [
        "one replica has no queue",
        "nobody is late",
        "one is on its way",
        "one gives no sample",
        "for less than ten seconds",
        "of so few requests there is no telling",
        "the limits were changed",
        "more come than are thought to be served",
        "nobody looked",
        "they do what they are thought to",
    ],
)
def test_it_shows_nothing_where(crowded: Fleet, case: str) -> None:
    match case:
        case "one replica has no queue":
            crowded.own["r0"] = {"waiting": 0, "oldest_waiting_seconds": 0.0}
        case "nobody is late":
            crowded.gauges["oldest_waiting_seconds"] = 0.5
        case "one is on its way":
            crowded.pending(1)
        case "one gives no sample":
            crowded.lost = {"r0"}
        case "for less than ten seconds":
            crowded.memory = replace(crowded.memory, crowded_since=NOW - 9.0)
        case "of so few requests there is no telling":
            crowded.counted = 2
        case "the limits were changed":
            crowded.memory = replace(crowded.memory, limits_changed_at=NOW - 12.0)
        case "more come than are thought to be served":
            crowded.per_second = 4.5 * CAPACITY
        case "nobody looked":
            crowded.memory = replace(crowded.memory, kappa_at=NOW - 90.0)
        case "they do what they are thought to":
            crowded.counted = 130
    assert crowded.decide()[1].ceiling is None


def test_another_crowd_that_shows_more_raises_it(crowded: Fleet) -> None:
    crowded.memory = replace(crowded.memory, ceiling=Ceiling(5.2, 1000.0, 200.0))
    crowded.counted = 110
    ceiling = crowded.decide()[1].ceiling
    assert ceiling is not None
    assert ceiling.per_second == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("counted", "oldest_seconds", "want"),
    [
        pytest.param(110, 0.1, 5.5, id="more"),
        pytest.param(90, 0.1, 5.0, id="less"),
        pytest.param(110, 2.0, 5.0, id="more, and somebody is late"),
        pytest.param(2, 0.1, 5.0, id="too few to tell"),
    ],
)
def test_what_they_do_for_a_minute_without_anybody_late_they_can_do(
    fleet: Fleet, counted: int, oldest_seconds: float, want: float
) -> None:
    fleet.counted, fleet.per_second = counted, 10.0
    fleet.own["r0"] = {"waiting": 3, "oldest_waiting_seconds": oldest_seconds}
    fleet.memory = replace(fleet.memory, ceiling=Ceiling(5.0, 1000.0, 200.0))
    ceiling = fleet.decide()[1].ceiling
    assert ceiling is not None
    assert ceiling.per_second == pytest.approx(want)


def test_requests_of_other_lengths_are_not_held_to_it(fleet: Fleet) -> None:
    fleet.memory = replace(fleet.memory, ceiling=Ceiling(3.0, 1000.0, 200.0))
    assert fleet.decide()[0].evidence["bound_per_second"] == pytest.approx(3.0)
    fleet.tokens = (1000.0, 2e6, 140.0)
    decision, memory = fleet.decide()
    assert decision.evidence["bound_per_second"] > CAPACITY
    assert memory.ceiling is not None
    assert Ceiling(3.0, 0.0, 200.0).of(Workload(0.0, 0.0, 250.0, 0.0, 0.0)) == 3.0
    assert Ceiling(3.0, 0.0, 200.0).of(Workload(1.0, 1.0, 200.0, 0.0, 0.0)) == inf


@pytest.mark.parametrize(("per_second", "want"), [(18.0, 5.0 * 1.01), (12.0, 5.0)])
def test_it_rises_while_promises_are_kept_by_replicas_that_do_nearly_as_much(
    fleet: Fleet, per_second: float, want: float
) -> None:
    """By a hundredth a minute, as trust does."""
    fleet.per_second = per_second
    fleet.memory = replace(fleet.memory, ceiling=Ceiling(5.0, 1000.0, 200.0), kappa_at=NOW - 60.0)
    ceiling = fleet.decide()[1].ceiling
    assert ceiling is not None
    assert ceiling.per_second == pytest.approx(want)


def test_it_outlives_a_restart(fleet: Fleet) -> None:
    memory = replace(fleet.memory, ceiling=Ceiling(5.0, 1000.0, 200.0), crowded_since=NOW - 20.0)
    kept = Memory.from_dict(json.loads(json.dumps(memory.to_dict())), NOW)
    assert (kept.ceiling, kept.crowded_since) == (memory.ceiling, memory.crowded_since)
    data = memory.to_dict()
    del data["ceiling"], data["crowded_since"]
    assert Memory.from_dict(data, NOW).ceiling is None

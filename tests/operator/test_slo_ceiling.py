"""The most that replicas are seen to do: what a crowd shows, when it shows nothing, how long it holds."""

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from tests.operator.law_fleet import BEST, CAPACITY, NOW, Fleet

from headway_operator.samples import Targets
from headway_operator.slo import Memory
from headway_operator.slo.ceiling import Ceiling
from headway_operator.slo.memory import Recommended
from headway_operator.slo.predictions import Workload


@pytest.fixture
def crowded(fleet: Fleet) -> Fleet:
    """Four replicas that are thought to do 6.06 requests a second, do 5 of the 20 that come, and have had
    queues that are late for a minute, in all the places that they have."""
    fleet.counted = 100
    fleet.gauges |= {"running": BEST.max_num_seqs, "waiting": 20, "oldest_waiting_seconds": 2.0}
    fleet.memory = fleet.memory._replace(crowded_since=NOW - 60.0, kappa_at=NOW - 5.0)
    return fleet


def shown(fleet: Fleet) -> float | None:
    """What one replica is thought to do at most after a pass."""
    ceiling = fleet.decide()[1].ceiling
    return None if ceiling is None else ceiling.per_second


def seen(per_second: float) -> Ceiling:
    return Ceiling(per_second, 1000.0, 200.0, BEST.max_num_seqs)


def test_replicas_are_thought_to_do_no_more_than_they_did_in_a_crowd(crowded: Fleet) -> None:
    first, memory = crowded.decide()
    assert first.replicas == 4
    assert memory.ceiling is not None
    assert memory.ceiling.per_second == pytest.approx(5.0)
    crowded.memory = crowded.memory._replace(ceiling=memory.ceiling)
    decision, memory = crowded.decide()
    assert decision.evidence["trusted_per_second"] == pytest.approx(5.0)
    assert (decision.cause, decision.replicas) == ("AddedReplicas", 5)
    assert memory.kappa == 1.0


@pytest.mark.parametrize(("running", "want"), [(30, 5.0 * 33 / 30), (12, 5.0)])
def test_fewer_places_than_the_best_show_less_than_a_replica_can_do_where_they_are_taken(
    crowded: Fleet, running: int, want: float
) -> None:
    few = replace(BEST, max_num_seqs=30)
    crowded.gauges |= {"limits": few, "running": running}
    crowded.memory = crowded.memory._replace(limits=few, limits_changed_at=NOW - 300.0)
    assert shown(crowded) == pytest.approx(want)


@pytest.mark.parametrize(
    "case",
    [
        "one replica has no queue",
        "one replica has nobody who is late",
        "one is on its way",
        "one gives no sample",
        "for less than ten seconds",
        "of so few requests there is no telling",
        "the limits were changed",
        "more come than are thought to be served",
        "nobody looked",
        "they do what they are thought to",
        "prompts were of another length",
    ],
)
def test_it_shows_nothing_where(crowded: Fleet, case: str) -> None:
    match case:
        case "one replica has no queue":
            crowded.own["r0"] = {"waiting": 0, "oldest_waiting_seconds": 0.0}
        case "one replica has nobody who is late":
            crowded.own["r0"] = {"waiting": 1, "oldest_waiting_seconds": 0.02}
        case "one is on its way":
            crowded.pending(1)
        case "one gives no sample":
            crowded.lost = {"r0"}
        case "for less than ten seconds":
            crowded.memory = crowded.memory._replace(crowded_since=NOW - 9.0)
        case "of so few requests there is no telling":
            crowded.counted = 2
        case "the limits were changed":
            crowded.memory = crowded.memory._replace(limits_changed_at=NOW - 12.0)
        case "more come than are thought to be served":
            crowded.per_second = 4.5 * CAPACITY
        case "nobody looked":
            crowded.memory = crowded.memory._replace(kappa_at=NOW - 90.0)
        case "they do what they are thought to":
            crowded.counted = 130
        case "prompts were of another length":
            crowded.now_totals = {"prompt_sum": 5_000.0 * 5 * crowded.per_second * 3}
    assert shown(crowded) is None


@pytest.mark.parametrize(
    ("known", "per_second", "counted", "want"),
    [
        pytest.param(5.2, 20.0, 110, 5.5, id="more, of fewer than are trusted"),
        pytest.param(4.0, 20.0, 100, 5.0, id="more, of more than are trusted"),
        pytest.param(5.2, 20.0, 90, 4.5, id="less"),
        pytest.param(5.2, 10.0, 20, 0.5 * CAPACITY, id="next to nothing, as when all stood still"),
    ],
)
def test_another_crowd_corrects_it(
    crowded: Fleet, known: float, per_second: float, counted: int, want: float
) -> None:
    crowded.memory = crowded.memory._replace(ceiling=seen(known))
    crowded.per_second, crowded.counted = per_second, counted
    assert shown(crowded) == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize(
    ("counted", "late_seconds_ago", "want"),
    [
        pytest.param(110, 90.0, 5.5, id="more"),
        pytest.param(90, 90.0, 5.0, id="less"),
        pytest.param(110, 30.0, 5.0, id="more, and somebody was late"),
        pytest.param(2, 90.0, 5.0, id="too few to tell"),
    ],
)
def test_what_they_do_for_a_minute_without_anybody_late_they_can_do(
    fleet: Fleet, counted: int, late_seconds_ago: float, want: float
) -> None:
    fleet.counted, fleet.per_second = counted, 10.0
    fleet.memory = fleet.memory._replace(ceiling=seen(5.0), late_at=NOW - late_seconds_ago)
    assert shown(fleet) == pytest.approx(want)


@pytest.mark.parametrize(
    ("known", "binds"),
    [
        pytest.param(seen(3.0), True, id="like those"),
        pytest.param(replace(seen(3.0), prompt=700.0), False, id="of longer prompts than those"),
        pytest.param(replace(seen(3.0), answer=300.0), False, id="of shorter answers"),
        pytest.param(replace(seen(3.0), max_num_seqs=20), False, id="in more places"),
        pytest.param(replace(seen(3.0), max_num_seqs=60), True, id="in fewer places"),
    ],
)
def test_other_requests_and_more_places_are_not_held_to_it(
    fleet: Fleet, known: Ceiling, *, binds: bool
) -> None:
    fleet.memory = fleet.memory._replace(ceiling=known)
    decision, memory = fleet.decide()
    trusted = decision.evidence["trusted_per_second"]
    assert trusted == pytest.approx(3.0 if binds else CAPACITY, rel=0.02)
    assert memory.ceiling == known
    assert Ceiling(3.0, 0.0, 200.0, 8).of(Workload(0.0, 0.0, 250.0, 0.0, 0.0), 8) == 3.0
    assert Ceiling(3.0, 0.0, 200.0, 8).of(Workload(1.0, 1.0, 200.0, 0.0, 0.0), 8) == inf


def test_requests_that_are_not_like_those_take_no_replicas_at_once(build: Any) -> None:
    """What was asked for by the ceiling is looked back on like all else."""
    fleet = Fleet(build, 10, 20.0)
    fleet.memory = fleet.memory._replace(ceiling=replace(seen(3.0), answer=300.0))
    fleet.memory = fleet.memory._replace(recommended=(Recommended(NOW - 100.0, 10, CAPACITY),))
    decision, _ = fleet.decide()
    assert decision.evidence["recommended_replicas"] < 10
    assert decision.replicas == 10


@pytest.mark.parametrize(
    ("kappa", "per_second", "want"), [(1.0, 15.0, 1.0), (1.0, 6.0, 1.0), (0.8, 6.0, 0.808)]
)
def test_it_comes_back_by_a_hundredth_a_minute_with_lost_trust(
    fleet: Fleet, kappa: float, per_second: float, want: float
) -> None:
    """However little replicas do, since that it is low has brought more of them. The model's word, of which
    they do less than three quarters, is trusted no further by that."""
    fleet.per_second = per_second
    fleet.memory = fleet.memory._replace(ceiling=seen(4.0), kappa=kappa, kappa_at=NOW - 60.0)
    _, memory = fleet.decide()
    assert memory.ceiling is not None
    assert memory.ceiling.per_second == pytest.approx(4.04)
    assert memory.kappa == pytest.approx(want)


def test_a_cut_of_trust_cuts_it_where_it_is_what_counts(fleet: Fleet) -> None:
    fleet.violated("tpot")
    fleet.per_second = 10.0
    for known, want in ((4.0, 3.6), (7.0, 7.0), (0.5 * CAPACITY, 0.5 * CAPACITY)):
        fleet.memory = fleet.memory._replace(ceiling=seen(known))
        _, memory = fleet.decide()
        assert memory.kappa == pytest.approx(0.9)
        assert memory.ceiling is not None
        assert memory.ceiling.per_second == pytest.approx(want, rel=0.02)


def test_it_is_forgotten_with_its_targets_and_its_revision(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(ceiling=seen(4.0))
    assert fleet.decide()[1].ceiling == seen(4.0)
    fleet.memory = fleet.memory._replace(revision="another")
    assert fleet.decide()[1].ceiling is None
    fleet.memory = fleet.memory._replace(revision="1a2b3c4d", targets=Targets(900.0, 26.0))
    assert fleet.decide()[1].ceiling is None


def test_it_outlives_a_restart(fleet: Fleet) -> None:
    memory = fleet.memory._replace(ceiling=seen(5.0), crowded_since=NOW - 20.0, revision="1a2b3c4d")
    kept = Memory.from_dict(json.loads(json.dumps(memory.to_dict())), NOW)
    assert (kept.ceiling, kept.crowded_since, kept.revision) == (seen(5.0), NOW - 20.0, "1a2b3c4d")
    data = memory.to_dict()
    del data["ceiling"], data["crowded_since"], data["revision"]
    assert Memory.from_dict(data, NOW).ceiling is None

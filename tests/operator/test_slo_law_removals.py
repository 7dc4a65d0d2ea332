"""When replicas go: how many, after how long, and what keeps them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.law_fleet import CAPACITY, NOW, Fleet, quiet

from headway_operator.samples import Targets
from headway_operator.slo import Memory
from headway_operator.slo.memory import Recommended, Regret


@pytest.mark.parametrize("age", [5.0, 700.0], ids=["at once", "past the deadline"])
def test_replicas_without_a_place_hold_no_removal_back(fleet: Fleet, age: float) -> None:
    fleet.pending(3, age=age, reason="Unschedulable")
    fleet.memory = fleet.memory._replace(recommended=(Recommended(NOW - 110, 4, 0.0),))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.cause) == (4, "RemovedReplica"), "all of them at once"
    fleet.per_second = CAPACITY
    fleet.memory = fleet.memory._replace(recommended=(Recommended(NOW - 110, 2, 0.0),))
    assert fleet.decide()[0].replicas == 4, "one that serves has its own turn"


def test_replicas_that_only_start_hold_removals_back(fleet: Fleet) -> None:
    fleet.pending(3)
    fleet.memory = fleet.memory._replace(recommended=(Recommended(NOW - 110, 4, 0.0),))
    assert fleet.decide()[0].replicas == 7


@pytest.mark.parametrize(
    ("load", "waiting", "most", "patience", "before"),
    [
        pytest.param(3.9, 1400, 64, 3.0, 1.0, id="a queue alone: they were too few"),
        pytest.param(8.5, 0, 64, 1.0, None, id="a rate that was too high for those before as well"),
        pytest.param(8.5, 0, 5, 1.0, None, id="the same where no more are allowed"),
    ],
)
def test_a_removal_is_regretted_where_those_before_would_have_been_enough(
    build: Any, load: float, waiting: int, most: int, patience: float, before: float | None
) -> None:
    fleet = Fleet(build, 4, load * CAPACITY)
    fleet.waiting = waiting
    fleet.target = replace(fleet.target, max_replicas=most)
    fleet.memory = fleet.memory._replace(removed_at=NOW - 60.0, removed_from=5)
    decision, memory = fleet.decide()
    assert decision.replicas > 4
    assert (memory.patience, memory.regret and memory.regret.patience) == (patience, before)
    assert (memory.removed_from is None) == (before is None)


@pytest.mark.parametrize(
    ("load", "kappa", "is_risen"), [(8.5, 1.0, True), (4.2, 1.0, False), (4.2, 0.7, False)]
)
@pytest.mark.parametrize("most", [5, 64])
def test_a_regret_is_reconsidered_in_every_pass_by_the_rate(
    build: Any, load: float, kappa: float, *, is_risen: bool, most: int
) -> None:
    """Whether or not more are asked for: a queue may have done so already, or no more are allowed. That each
    is trusted with less is no rise."""
    fleet = Fleet(build, 9 if most == 64 else 5, load * CAPACITY)
    fleet.target = replace(fleet.target, max_replicas=most)
    fleet.memory = fleet.memory._replace(
        kappa=kappa,
        patience=3.0,
        patience_at=NOW - 30.0,
        removed_at=NOW - 90.0,
        removed_from=5,
        removed_per_second=CAPACITY,
        regret=Regret(1.0, None),
    )
    decision, memory = fleet.decide()
    assert decision.replicas <= len(fleet.replicas), "none are asked for"
    assert memory.patience == (1.0 if is_risen else 3.0)


def test_down_is_one_at_a_time_after_the_whole_time_looked_back(build: Any) -> None:
    decision, memory = quiet(build).decide()
    assert (decision.replicas, decision.cause) == (5, "RemovedReplica")
    assert memory.replicas_lowered_at == NOW
    assert (memory.removed_at, memory.removed_from) == (NOW, 6)


def test_a_large_fleet_goes_down_by_a_tenth(build: Any) -> None:
    assert quiet(build, ready=40).decide()[0].replicas == 36


def test_the_highest_recommendation_looked_back_on_holds(build: Any) -> None:
    decision, _ = quiet(build, recommended=6).decide()
    assert (decision.replicas, decision.cause) == (6, "Stabilizing")
    assert "would not have over the last 300 s" in decision.message
    assert "taken back" not in decision.message
    assert "regretted_rise" not in decision.evidence


@pytest.mark.parametrize(
    ("silent", "want"),
    [
        ("a replica", "; none goes while 1 of 6 give no usable sample"),
        ("the gateway", "; none goes while a gateway"),
    ],
)
def test_it_is_said_whose_silence_keeps_what_is_not_needed(build: Any, silent: str, want: str) -> None:
    fleet = quiet(build)
    fleet.gateway_lost, fleet.lost = silent == "the gateway", {"r5"} if silent == "a replica" else set()
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.cause) == (6, "Stabilizing")
    assert want in decision.message


def test_what_was_recommended_counts_by_what_a_replica_is_known_to_do_now(build: Any) -> None:
    """Six were recommended when one was thought to do half as much: three are what such a load needs."""
    fleet = quiet(build)
    for then, want in ((CAPACITY / 2, 5), (CAPACITY, 6), (2 * CAPACITY, 6)):
        fleet.memory = fleet.memory._replace(recommended=(Recommended(NOW - 110, 6, then),))
        assert fleet.decide()[0].replicas == want
    at, number, then, _ = fleet.decide()[1].recommended[-1]
    assert (at, number) == (NOW, 2)
    assert then == pytest.approx(CAPACITY, rel=0.15)


def test_what_is_recommended_now_is_never_gone_below(build: Any) -> None:
    """Whatever was called for before by what one was trusted with then, as in a crowd that is just over."""
    fleet = Fleet(build, 4, 3.5 * CAPACITY)
    history = [Recommended(NOW - age, 5, 0.3 * CAPACITY) for age in range(305, 0, -10)]
    fleet.memory = fleet.memory._replace(recommended=tuple(history))
    decision, _ = fleet.decide()
    assert decision.evidence["recommended_replicas"] == 4
    assert decision.replicas == 4


def test_a_recommendation_is_remembered_without_the_bounds(build: Any) -> None:
    """Four of at most four say nothing of what is needed once one of them is known to do more."""
    fleet = Fleet(build, 4, 8.5 * CAPACITY)
    fleet.target = replace(fleet.target, max_replicas=4)
    decision, memory = fleet.decide()
    assert decision.replicas == 4
    assert memory.recommended[-1].replicas >= 9


def test_of_equal_recommendations_that_of_replicas_that_do_more_counts(build: Any) -> None:
    fleet = quiet(build)
    number = fleet.decide()[1].recommended[-1].replicas
    for then, want in ((0.3 * CAPACITY, CAPACITY), (2.0 * CAPACITY, 2.0 * CAPACITY)):
        fleet.memory = fleet.memory._replace(recommended=(Recommended(NOW - 5.0, number, then),))
        last = fleet.decide()[1].recommended[-1]
        assert (last.at, last.replicas) == (NOW - 5.0, number)
        assert last.per_second == pytest.approx(want, rel=0.15)


def test_what_earlier_versions_remembered_of_recommendations_counts_whole(build: Any) -> None:
    fleet = quiet(build, recommended=6)
    data = fleet.memory.to_dict()
    data["recommended"] = [one[:2] for one in data["recommended"]]
    fleet.memory = Memory.from_dict(data, NOW)._replace(watched_since=NOW - 5000)
    assert fleet.decide()[0].replicas == 6


def test_nothing_is_removed_at_once_when_a_model_has_been_learnt(build: Any) -> None:
    """What symptoms have just asked for is not taken away by the first word of the model."""
    fleet = quiet(build, recommended=8)
    fleet.memory = fleet.memory._replace(workload=None)
    decision, memory = fleet.decide()
    assert (decision.replicas, decision.cause) == (6, "Stabilizing")
    assert max(one.replicas for one in memory.recommended) == 6, (
        "and the 8 of the time without one is forgotten"
    )


def test_nothing_is_removed_for_the_window_after_a_restart(build: Any) -> None:
    fleet = quiet(build)
    fleet.memory = Memory.from_dict(fleet.memory.to_dict(), NOW)._replace(slices=())
    assert fleet.decide()[0].replicas == 6


@pytest.mark.parametrize("lost", ["replica", "gateway"])
def test_partial_metrics_never_take_a_replica_away(build: Any, lost: str) -> None:
    fleet = quiet(build)
    fleet.lost, fleet.gateway_lost = ({"r1"} if lost == "replica" else set()), lost == "gateway"
    assert fleet.decide()[0].replicas == 6


def test_fewer_are_not_recommended_where_a_little_more_load_would_need_those_there_are(build: Any) -> None:
    """Three could take the load with its bursts; the dead band wants them to be able to take more."""
    recommended = {
        share: Fleet(build, 4, 3 * CAPACITY * share).decide()[0].evidence["recommended_replicas"]
        for share in (0.80, 0.94)
    }
    assert recommended == {0.80: 3, 0.94: 4}
    assert Fleet(build, 3, 3 * CAPACITY * 0.94).decide()[0].replicas == 3


def test_the_dead_band_is_no_wider_where_a_target_is_close_to_what_an_idle_replica_takes(build: Any) -> None:
    """11 ms for tokens that take 8.55 at least, of which a tenth is a third of what is left."""

    def recommended(ready: int, per_second: float) -> float:
        fleet = Fleet(build, ready, per_second)
        fleet.promise(Targets(700.0, 11.0))
        return fleet.decide()[0].evidence["recommended_replicas"]

    fleet = Fleet(build, 4, 4.0)
    fleet.promise(Targets(700.0, 11.0))
    one = fleet.decide()[0].evidence["capacity_per_second"]
    assert recommended(4, 3 * 0.75 * one) == 3
    assert recommended(4, 3 * 0.93 * one) == 4


@pytest.mark.parametrize("milliseconds", [1500.0, 60.0], ids=["as latencies allow", "with none that do"])
def test_fewer_are_asked_what_fewer_do(build: Any, milliseconds: float) -> None:
    """Of two a gateway gives a long prompt to the one that is free; one alone has none to choose from. Where
    a target is missed at any rate, what a replica is taken to do all the same says when one goes."""

    def numbers(ready: int, per_second: float) -> dict[str, float]:
        fleet = Fleet(build, ready, per_second)
        fleet.promise(Targets(milliseconds, 200.0))
        fleet.tokens = (7000.0, 1e8, 50.0)
        return dict(fleet.decide()[0].evidence)

    alone, of_two = (numbers(ready, 0.3)["capacity_per_second"] for ready in (1, 2))
    assert alone < 0.9 * of_two if milliseconds == 1500.0 else alone == of_two
    rates = [0.01 * k for k in range(10, 120)]
    enough = [rate for rate in rates if numbers(2, rate)["recommended_replicas"] == 1]
    assert 0.5 * alone < max(enough) < alone / 1.1


@pytest.mark.parametrize(
    ("surges", "want"),
    [
        pytest.param((6,), 5, id="for one moment of twelve"),
        pytest.param((2, 6), 5, id="for two"),
        pytest.param((2, 6, 9), 6, id="for three"),
        pytest.param((11,), 6, id="now"),
    ],
)
def test_no_replica_is_kept_for_moments_that_called_for_it(
    build: Any, surges: tuple[int, ...], want: int
) -> None:
    fleet = quiet(build)
    fleet.target = replace(fleet.target, stabilization_seconds=120.0)
    numbers = [6 if number in surges else 3 for number in range(12)]
    history = tuple(Recommended(NOW - 119.0 + 10.0 * number, one) for number, one in enumerate(numbers))
    fleet.memory = fleet.memory._replace(recommended=history)
    assert fleet.decide()[0].replicas == want


def test_of_a_longer_time_looked_back_no_more_moments_are_left_out(build: Any) -> None:
    fleet = quiet(build)
    fleet.target = replace(fleet.target, stabilization_seconds=600.0)
    history = tuple(Recommended(NOW - 595.0 + 10.0 * number, 6 if number < 3 else 3) for number in range(60))
    fleet.memory = fleet.memory._replace(recommended=history)
    assert fleet.decide()[0].replicas == 6


def test_of_a_time_that_was_seen_in_part_no_moments_are_left_out(build: Any) -> None:
    """As after the first model, when what there is counts as recommended."""
    fleet = quiet(build)
    fleet.target = replace(fleet.target, stabilization_seconds=120.0)
    history = tuple(Recommended(NOW - 60.0 + 10.0 * number, 3 if number else 6) for number in range(6))
    fleet.memory = fleet.memory._replace(recommended=history)
    assert fleet.decide()[0].replicas == 6


def regretted(build: Any, roomy: int, *, since: float = 1000.0) -> Fleet:
    """Six replicas, where three have been enough for two minutes, and so many with room for a rise; twice
    removals were regretted, the last time so long ago."""
    fleet = quiet(build)
    fleet.target = replace(fleet.target, stabilization_seconds=120.0)
    history = tuple(
        Recommended(NOW - age, 6 if age > 120 else 3, roomy=6 if age > 120 else roomy)
        for age in range(355, 0, -10)
    )
    fleet.memory = fleet.memory._replace(
        recommended=history, patience=3.0, patience_at=NOW - since, regretted_rise=0.25
    )
    return fleet


@pytest.mark.parametrize(
    ("roomy", "since", "want"),
    [
        pytest.param(5, 1000.0, 5, id="five have the room"),
        pytest.param(6, 1000.0, 6, id="none but all of them have it"),
        pytest.param(5, 100.0, 6, id="it was not asked for all that time"),
    ],
)
def test_after_a_regret_who_leaves_room_for_such_a_rise_waits_no_longer(
    build: Any, roomy: int, since: float, want: int
) -> None:
    decision, _ = regretted(build, roomy, since=since).decide()
    assert decision.replicas == want
    words = ", or for 120 s with room for 25% more, since a removal was taken back"
    assert (words in decision.message) == (want == 6)
    assert decision.evidence["regretted_rise"] == 0.25


def test_after_a_regret_moments_without_room_keep_no_replica_either(build: Any) -> None:
    fleet = regretted(build, 5)
    history = list(fleet.memory.recommended)
    for place in (-3, -7):
        history[place] = history[place]._replace(roomy=6)
    fleet.memory = fleet.memory._replace(recommended=tuple(history))
    assert fleet.decide()[0].replicas == 5
    history[-5] = history[-5]._replace(roomy=6)
    fleet.memory = fleet.memory._replace(recommended=tuple(history))
    assert fleet.decide()[0].replicas == 6


@pytest.mark.parametrize(("rise", "want"), [(0.0, (3, 4)), (0.15, (3, 4)), (0.6, (4, 5))])
def test_room_is_for_the_rise_that_was_regretted_and_for_a_fifth_at_least(
    build: Any, rise: float, want: tuple[int, int]
) -> None:
    """Of seven replicas, three of which could take the load."""
    fleet = Fleet(build, 7, 2.27 * CAPACITY)
    assert fleet.decide()[1].recommended[-1].roomy == 0, "nothing was regretted"
    fleet.memory = fleet.memory._replace(patience=3.0, patience_at=NOW - 1000.0, regretted_rise=rise)
    for per_second, roomy in zip((2.27, 2.55), want, strict=True):
        fleet.per_second = per_second * CAPACITY
        last = fleet.decide()[1].recommended[-1]
        assert (last.replicas, last.roomy) == (3, roomy)


def test_what_was_recommended_and_regretted_outlives_a_restart(build: Any) -> None:
    memory = regretted(build, 5).memory._replace(removed_load=2.5, regret=Regret(1.0, None, 0.1))
    again = Memory.from_dict(json.loads(json.dumps(memory.to_dict())), NOW)
    for name in ("recommended", "regretted_rise", "removed_load", "regret"):
        assert getattr(again, name) == getattr(memory, name)

"""Minutes of a toy fleet under the controller. The fleet checks the invariants after every pass."""

import random
from itertools import pairwise
from typing import Any

import pytest

from headway_operator.samples import Limits, Targets
from headway_operator.slo import Memory
from headway_operator.state import Decision


def reversals(decisions: list[Decision]) -> int:
    """How often the number of replicas turned from growing to shrinking or back."""
    moves = [b.replicas - a.replicas for a, b in pairwise(decisions) if a.replicas != b.replicas]
    return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


@pytest.mark.parametrize("interval_seconds", [1.0, 2.0, 5.0])
def test_a_load_beyond_one_replica_is_met_and_let_go_again(build: Any, interval_seconds: float) -> None:
    fleet = build.fleet(build.target(stabilization_seconds=30.0), interval_seconds=interval_seconds)
    fleet.run(40, 0.5)
    began = fleet.now
    loaded = fleet.run(150, 10)
    raised_at = next(d.at for d in loaded if d.limits.max_num_seqs > 2)
    added_at = next(d.at for d in loaded if d.replicas > 1)
    assert raised_at - began <= 10
    assert added_at - began <= 30
    assert loaded[-1].ttft.verdict == "met"
    assert loaded[-1].tpot.verdict == "met"
    assert loaded[-1].replicas > 1
    after = fleet.run(240, 0.5)
    assert after[-1].replicas == 1
    assert after[-1].ttft.verdict == "met"
    assert reversals(fleet.decisions) == 1


@pytest.mark.parametrize("requests_per_second", [1, 4, 7, 10, 14, 20])
def test_a_steady_load_settles_without_flapping(build: Any, requests_per_second: float) -> None:
    fleet = build.fleet(build.target(stabilization_seconds=30.0))
    fleet.run(240, requests_per_second)
    settled = fleet.run(600, requests_per_second)
    assert reversals(fleet.decisions) <= 1
    # At most one more replica is let go, and limits stand still.
    assert {d.replicas for d in settled} <= {settled[-1].replicas, settled[-1].replicas + 1}
    assert len({d.limits for d in settled}) == 1
    assert settled[-1].ttft.verdict == "met"


def test_waves_of_load_move_replicas_no_more_than_the_waves_do(build: Any) -> None:
    fleet = build.fleet(build.target(stabilization_seconds=30.0))
    for requests_per_second in (1, 10, 1, 10, 1, 10):
        fleet.run(120, requests_per_second)
    assert reversals(fleet.decisions) <= 6


def test_no_traffic_ends_at_the_minimum(build: Any) -> None:
    fleet = build.fleet(build.target(min_replicas=2, stabilization_seconds=30.0))
    fleet.run(90, 20)
    assert fleet.wanted > 2
    # What waited at the end is served, and then out of the window.
    quiet = fleet.run(360, 0)
    assert quiet[-1].replicas == 2
    assert quiet[-1].ttft.p_milliseconds is None or quiet[-1].ttft.verdict != "violated"


def test_lost_samples_never_cost_a_replica(build: Any) -> None:
    fleet = build.fleet(build.target(stabilization_seconds=30.0))
    fleet.run(120, 15)
    before = fleet.wanted
    assert before > 1
    fleet.lose = lambda now, name: True
    blind = fleet.run(200, 0.5)
    assert {d.replicas for d in blind} == {before}
    assert {d.blocker for d in blind[10:]} == {"SamplesMissing"}
    fleet.lose = lambda now, name: False
    assert fleet.run(240, 0.5)[-1].replicas < before


def test_a_fifth_of_all_samples_lost_is_survived(build: Any) -> None:
    fleet = build.fleet(
        build.target(stabilization_seconds=30.0),
        lose=lambda now, name: random.Random(f"{now:.0f} {name}").random() < 0.2,
    )
    fleet.run(60, 1)
    loaded = fleet.run(200, 10)
    assert loaded[-1].replicas > 1
    assert loaded[-1].ttft.verdict == "met"


def test_slow_tokens_bring_the_batch_limit_down_until_they_are_fast(build: Any) -> None:
    fleet = build.fleet(build.target(initial=Limits(64, 2048), stabilization_seconds=30.0))
    # A batch that may fill to 60 running makes a TPOT of 80 ms, twice its target.
    fleet.run(20, 0.5)
    loaded = fleet.run(240, 12)
    assert any(d.tpot.verdict == "violated" for d in loaded)
    assert loaded[-1].limits != Limits(64, 2048)
    assert loaded[-1].tpot.verdict == "met"
    assert loaded[-1].ttft.verdict == "met"


def test_a_target_that_an_idle_replica_misses_adds_none(build: Any) -> None:
    fleet = build.fleet(build.target(targets=Targets(30.0, None), initial=Limits(8, 512)))
    decisions = fleet.run(300, 0.4)
    assert {d.replicas for d in decisions} == {1}
    assert decisions[-1].blocker == "TargetInfeasible"
    assert decisions[-1].ttft.verdict == "violated"


def test_a_restart_in_the_middle_changes_nothing(build: Any) -> None:
    fleet = build.fleet(build.target(stabilization_seconds=60.0))
    fleet.run(120, 15)
    before = fleet.decisions[-1]
    fleet.memory = Memory.from_dict(fleet.memory.to_dict(), fleet.now)
    assert fleet.run(2, 15)[-1].replicas == before.replicas
    # And without any checkpoint: what exists is kept, and nothing is removed for a stabilization time.
    fleet.memory = Memory.from_dict(None, fleet.now)
    after = fleet.run(58, 0.5)
    assert {(d.replicas, d.limits) for d in after} == {(before.replicas, before.limits)}


def test_slow_starts_are_waited_for_and_not_asked_for_twice(build: Any) -> None:
    fleet = build.fleet(build.target(), start_seconds=90.0)
    fleet.run(100, 0.5)
    loaded = fleet.run(300, 8)
    grown = [d for d in loaded if d.cause == "AddedReplicas"]
    assert grown
    assert all(later.at - earlier.at >= 90 for earlier, later in pairwise(grown))


def test_fixed_replicas_stay_fixed_under_any_load(build: Any) -> None:
    fleet = build.fleet(build.target(fixed_replicas=2))
    decisions = fleet.run(120, 20)
    assert {d.replicas for d in decisions} == {2}
    assert decisions[-1].limits.max_num_seqs > 2


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_invariants_hold_and_calm_returns(build: Any, seed: int) -> None:
    """Loads that jump, samples that are lost, engines that die: the fleet checks every single decision."""
    chance = random.Random(seed)
    fleet = build.fleet(
        build.target(min_replicas=chance.choice([1, 2]), stabilization_seconds=30.0),
        start_seconds=chance.choice([4.0, 8.0, 30.0]),
        interval_seconds=chance.choice([1.0, 2.0, 5.0]),
    )
    for _ in range(12):
        share_lost = chance.choice([0.0, 0.0, 0.2, 1.0])
        fleet.lose = lambda now, name, share=share_lost: chance.random() < share
        fleet.run(30, chance.choice([0, 0.5, 3, 10, 25]))
        if fleet.replicas and chance.random() < 0.3:
            victim = chance.choice(fleet.replicas)
            fleet.held.extendleft(victim.crash(fleet.now, fleet.start_seconds))
    fleet.lose = lambda now, name: False
    calm = fleet.run(600, 0.5)
    assert calm[-1].replicas == fleet.target.min_replicas
    assert calm[-1].ttft.verdict == "met"


def test_a_replica_that_is_slow_alone_is_named_and_nothing_is_moved_for_it(build: Any) -> None:
    target = build.target(min_replicas=4, max_replicas=8, initial=Limits(16, 2048), percentile=99)
    fleet = build.fleet(target)
    fleet.run(150, 8)
    before = fleet.decisions[-1]
    assert before.replicas == 4
    assert not before.sick
    slow = fleet.replicas[0]
    slow.slowness = 15.0
    after = fleet.run(300, 8)
    assert {(d.replicas, d.limits) for d in after} == {(4, before.limits)}
    assert after[-1].ttft.verdict == "violated"
    assert after[-1].blocker == "SickReplica"
    assert after[-1].sick.startswith(f"{slow.name} in ")
    assert "the other 3 keep it with room for the whole load" in after[-1].sick
    assert "delete the pod" in after[-1].message
    # Mended, it is no longer named.
    slow.slowness = 1.0
    assert not fleet.run(400, 8)[-1].sick


def test_where_the_others_have_no_room_replicas_are_added_whoever_is_slow(build: Any) -> None:
    fleet = build.fleet(build.target(min_replicas=2, max_replicas=8, initial=Limits(4, 512)))
    fleet.run(60, 2)
    fleet.replicas[0].slowness = 15.0
    assert max(d.replicas for d in fleet.run(200, 14)) > 2


def test_where_all_are_slow_nobody_is_sick(build: Any) -> None:
    fleet = build.fleet(build.target(min_replicas=4, max_replicas=8, initial=Limits(16, 2048)))
    fleet.run(60, 8)
    for one in fleet.replicas:
        one.slowness = 15.0
    assert not any(d.sick for d in fleet.run(120, 8))

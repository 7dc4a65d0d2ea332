"""Measures of runs made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import Limits
from headway_operator.slo import target_of
from headway_operator.state import Attainment
from headway_simulator.measures import judged_from, measures, reversals
from headway_simulator.records import Fate, Flight, Pass, PodLife, Run
from headway_simulator.report import budget_reversals
from headway_simulator.timeline import by_hour, levels, timeline
from headway_simulator.trace import Arrival

UNKNOWN = Attainment(None, None, 0, 0, "unknown")


def flight(at: float, ttft: float | None = 0.5, tpot: float | None = 0.05, fate: Fate = "finished") -> Flight:
    return Flight(Arrival(at, 10, 10), at, ttft, tpot, at + 1, fate)


def decided(at: float, replicas: int, seqs: int = 32) -> Pass:
    return Pass(at, replicas, Limits(seqs, 1024), "Steady", "", "", replicas, 0, replicas, UNKNOWN, UNKNOWN)


def judged(build: Any, run: Run, step_at: float | None = None) -> Any:
    return measures(run, target_of(build.service().spec), 2, step_at)


def test_only_what_ended_well_and_met_both_targets_counts(build: Any) -> None:
    run = Run(0.0, 100.0)
    run.flights = [
        flight(0.0),
        flight(1.0, ttft=1.0, tpot=0.06),  # on both targets
        flight(2.0, tpot=None),  # one token
        flight(3.0, ttft=1.001),
        flight(4.0, tpot=0.0601),
        flight(5.0, fate="rejected", ttft=None, tpot=None),
        flight(6.0, fate="lost"),
        flight(7.0, fate="unfinished", tpot=None),
    ]
    found = judged(build, run)
    assert found.joint_attainment == 3 / 8
    assert found.ttft_attainment == 4 / 8
    assert found.tpot_attainment == 4 / 8
    assert (found.num_rejected, found.num_lost, found.num_unfinished) == (1, 1, 1)
    assert found.ttft_milliseconds == pytest.approx(1001)


def test_what_came_before_is_not_judged(build: Any) -> None:
    run = Run(0.0, 100.0)
    run.flights = [flight(0.0, fate="lost"), flight(39.9, fate="lost"), flight(40.0), flight(50.0)]
    run.passes = [decided(0.0, 1), decided(30.0, 2), decided(60.0, 3)]
    run.pods = [PodLife("a", 0.0, 0.0, 50.0)]
    found = judged(build, judged_from(run, 40.0))
    assert found.num_arrivals == 2
    assert found.joint_attainment == 1.0
    assert found.replica_hours == pytest.approx(10 / 3600)
    assert found.actions_per_hour == 0
    assert judged(build, run).num_arrivals == 4


def test_pods_are_paid_for_while_they_hold_their_place_and_the_load_lasts(build: Any) -> None:
    run = Run(100.0, 3700.0)
    run.pods = [
        PodLife("a", 50.0, 60.0, None),  # from before to after
        PodLife("b", 1000.0, None, 1900.0),  # never ready
        PodLife("c", 3600.0, 3650.0, 5000.0),
        PodLife("d", 4000.0, None, 4100.0),
    ]
    found = judged(build, run)
    assert found.replica_hours == pytest.approx((3600 + 900 + 100) / 3600)
    assert found.gpu_hours == pytest.approx(2 * found.replica_hours)
    assert found.mean_replicas == pytest.approx(4600 / 3600)
    assert found.most_replicas == 2


def test_the_worst_five_minutes_are_found_and_thin_ones_left_out(build: Any) -> None:
    run = Run(0.0, 1800.0)
    run.flights = [flight(float(at), ttft=2.0 if 600 <= at < 660 else 0.5) for at in range(0, 1500, 2)]
    run.flights += [flight(1500.0 + i, ttft=5.0) for i in range(1)]
    found = judged(build, run)
    assert found.worst_five_minutes == pytest.approx(1 - 30 / 150)


def test_without_arrivals_enough_there_are_no_worst_five_minutes(build: Any) -> None:
    run = Run(0.0, 1800.0)
    run.flights = [flight(float(at)) for at in range(0, 1800, 60)]
    assert judged(build, run).worst_five_minutes is None
    assert judged(build, Run(0.0, 10.0)).joint_attainment == 1.0


@pytest.mark.parametrize(("seconds", "want"), [(299.0, None), (300.0, 1.0)])
def test_what_is_shorter_than_five_minutes_has_no_worst_five(
    build: Any, seconds: float, want: float | None
) -> None:
    run = Run(0.0, seconds)
    run.flights = [flight(float(at)) for at in range(100)]
    assert judged(build, run).worst_five_minutes == want


def test_actions_and_reversals_are_counted_by_the_hour(build: Any) -> None:
    run = Run(0.0, 1800.0)
    course = [(1, 32), (2, 32), (2, 16), (3, 16), (2, 32), (2, 32), (3, 8)]
    run.passes = [decided(10.0 * i, *one) for i, one in enumerate(course)]
    found = judged(build, run)
    assert found.actions_per_hour == 2 * 5
    assert found.reversals_per_hour == 2 * 2
    assert found.limit_reversals_per_hour == 2 * 2
    assert reversals([0, 1, 0, 2, -1, 0, -1, 3]) == 2
    budgets = (2048, 2048, 96, 96, 512, 600, 96)
    passes = [
        replace(one, limits=Limits(32, tokens)) for one, tokens in zip(run.passes, budgets, strict=True)
    ]
    assert budget_reversals(passes) == 2


def test_recovery_is_when_a_whole_minute_meets_the_objective(build: Any) -> None:
    run = Run(0.0, 600.0)
    run.flights = [flight(float(at), ttft=3.0 if 200 <= at < 250 or at == 275 else 0.5) for at in range(600)]
    # One miss of ten at 275 breaks the objective of 95% once more.
    assert judged(build, run, 200.0).recovery_seconds == 80.0
    run.flights = [flight(float(at), ttft=3.0 if at >= 200 else 0.5) for at in range(600)]
    assert judged(build, run, 200.0).recovery_seconds is None
    assert judged(build, run).recovery_seconds is None


def test_a_timeline_has_a_row_a_minute(build: Any) -> None:
    run = Run(0.0, 150.0)
    run.flights = [flight(float(at), ttft=0.1 if at < 60 else 2.0) for at in range(90)]
    run.passes = [decided(5.0, 1), decided(65.0, 3, seqs=16)]
    rows = timeline(run, target_of(build.service().spec))
    assert [one.at_seconds for one in rows] == [0.0, 60.0, 120.0]
    assert [one.requests_per_second for one in rows] == [1.0, 0.5, 0.0]
    assert [one.wanted for one in rows] == [1, 3, 3]
    assert [one.max_num_seqs for one in rows] == [32, 16, 16]
    assert [one.joint_attainment for one in rows] == [1.0, 0.0, None]
    assert rows[1].ttft_milliseconds == pytest.approx(2000)
    assert rows[2].ttft_milliseconds is None


def test_hours_have_what_came_and_what_was_there(build: Any) -> None:
    run = Run(0.0, 5400.0)
    run.flights = [flight(10.0), flight(3599.0, ttft=2.0), flight(3600.0)]
    run.pods = [PodLife("a", 0.0, 30.0, None), PodLife("b", 1800.0, 1900.0, 4500.0)]
    first, last = by_hour(run, target_of(build.service().spec))
    assert (first.at_seconds, first.replicas, first.joint_attainment) == (0.0, 1.5, 0.5)
    assert first.requests_per_second == 2 / 3600
    # Half an hour of it is there, of which b was there for the first half.
    assert (last.at_seconds, last.replicas, last.joint_attainment) == (3600.0, 1.5, 1.0)
    assert last.requests_per_second == 1 / 1800
    hours = first.replicas + last.replicas / 2
    assert judged(build, run).replica_hours == pytest.approx(hours)


def test_levels_are_told_when_they_change() -> None:
    run = Run(100.0, 160.0)
    run.passes = [decided(101.0, 1), decided(106.0, 1), decided(111.0, 2), decided(116.0, 2, seqs=16)]
    run.passes.append(decided(160.0, 5))  # when the load is over
    told = [(one.at_seconds, one.wanted, one.ready, one.max_num_seqs) for one in levels(run)]
    assert told == [(1.0, 1, 1, 32), (11.0, 2, 2, 32), (16.0, 2, 2, 16)]

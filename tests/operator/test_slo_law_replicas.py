"""How many replicas the law asks for, and when it asks for none."""

import re
from dataclasses import replace
from math import ceil, sqrt
from typing import Any

import pytest
from tests.operator.law_fleet import CAPACITY, NOW, Fleet, quiet

from headway_operator.samples import Targets
from headway_operator.slo.forecast import Course
from headway_operator.slo.persistence import Persistence


@pytest.mark.parametrize(
    ("ready", "per_second", "want"),
    [
        pytest.param(1, 500.0, 5, id="four more where that is more than double"),
        pytest.param(6, 500.0, 12, id="doubled"),
        pytest.param(20, 500.0, 28, id="eight more at most"),
        pytest.param(4, 5.5 * CAPACITY, 6, id="no more than the load needs"),
    ],
)
def test_up_is_at_once_and_bounded(build: Any, ready: int, per_second: float, want: int) -> None:
    decision, _ = Fleet(build, ready, per_second).decide()
    assert (decision.replicas, decision.cause) == (want, "AddedReplicas")


def test_no_promise_has_to_break_before_replicas_are_added(build: Any) -> None:
    decision, _ = Fleet(build, 4, 5.5 * CAPACITY).decide()
    assert decision.ttft.verdict == decision.tpot.verdict == "met"
    assert decision.replicas == 6


def test_what_is_pending_is_counted_and_not_asked_for_twice(fleet: Fleet) -> None:
    fleet.per_second = 5.5 * CAPACITY
    fleet.pending(2)
    decision, _ = fleet.decide()
    assert decision.replicas == 6


def test_pending_replicas_do_not_freeze_what_the_load_needs_beyond_them(fleet: Fleet) -> None:
    fleet.per_second = 8.5 * CAPACITY
    fleet.pending(2)
    decision, _ = fleet.decide()
    assert decision.replicas == 9


@pytest.mark.parametrize(
    ("ages", "reason", "want"),
    [
        pytest.param([700.0, 700.0], "ImagePullBackOff", 8, id="one more for each"),
        pytest.param([1400.0, 1400.0, 700.0, 700.0], "ImagePullBackOff", 8, id="none for a substitute"),
        pytest.param([700.0, 700.0], "Unschedulable", 6, id="none where no place is found"),
    ],
)
def test_a_replica_past_its_deadline_is_no_supply(
    fleet: Fleet, ages: list[float], reason: str, want: int
) -> None:
    fleet.per_second = 5.5 * CAPACITY
    for age in ages:
        fleet.pending(1, age=age, reason=reason)
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (want, reason)


@pytest.mark.parametrize(("age", "want"), [(700.0, 6), (1700.0, 6), (1900.0, 8)])
def test_replicas_that_always_start_slowly_are_no_sooner_past_their_deadline(
    fleet: Fleet, age: float, want: int
) -> None:
    """Nine tenths of them take 900 s, and none twice as long."""
    fleet.per_second = 5.5 * CAPACITY
    fleet.pending(2, age=age)
    fleet.memory = fleet.memory._replace(starts=tuple((NOW - 9000.0 - k, 900.0) for k in range(20)))
    assert fleet.decide()[0].replicas == want


def test_a_backlog_asks_for_what_drains_it(fleet: Fleet) -> None:
    fleet.waiting = 1400
    decision, _ = fleet.decide()
    numbers = decision.evidence
    # What is spare while replicas start takes its part; the rest is served within 45 s.
    spare = 4 * numbers["capacity_per_second"] - numbers["requests_per_second"]
    left = 1400 - spare * numbers["lead_seconds"]
    rate = numbers["requests_per_second"] + left / 45.0
    assert decision.replicas == ceil(rate / numbers["capacity_per_second"]) > 4


def test_bounds_of_the_spec_hold(fleet: Fleet) -> None:
    fleet.per_second = 40.0
    fleet.target = replace(fleet.target, max_replicas=5)
    assert fleet.decide()[0].replicas == 5


@pytest.mark.parametrize("who", ["HorizontalPodAutoscaler/demo", "ScaledObject/demo"])
def test_there_is_one_writer(fleet: Fleet, who: str) -> None:
    fleet.other_scaler, fleet.per_second = who, 40.0
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (4, "OtherScaler")


def test_without_most_samples_everything_holds_but_the_minimum(build: Any) -> None:
    fleet = quiet(build)
    fleet.lost = {"r0", "r1", "r2", "r3"}
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (6, "SamplesMissing")
    fleet.target = replace(fleet.target, min_replicas=8)
    assert fleet.decide()[0].replicas == 8


def risen(build: Any, *broken: str) -> Fleet:
    """Four replicas, and for half a minute three times the load; of earlier bursts nothing was left then."""
    fleet = Fleet(build, 4, 2.2 * CAPACITY)
    learnt = Persistence(number=20.0, kept=0.0, squares=20.0, faded_at=NOW)
    fleet.memory = fleet.memory._replace(course=Course(persistence=learnt))
    later = Fleet(build, 4, 6.0 * CAPACITY)
    later.violated(*broken)
    slices = (*fleet.slices()[:-6], *later.slices()[-6:])
    fleet.slices = lambda: slices  # type: ignore[method-assign]
    return fleet


def test_what_is_known_of_bursts_decides_how_many_are_added(build: Any) -> None:
    fleet = risen(build)
    decision, _ = fleet.decide()
    assert decision.replicas == 4
    assert decision.evidence["rate_persistence"] < 0.1
    assert decision.evidence["requests_per_second"] > 5.0 * CAPACITY
    fleet.memory = fleet.memory._replace(course=Course())
    assert fleet.decide()[0].replicas > 6


def test_a_burst_that_breaks_the_promise_counts_whole(build: Any) -> None:
    decision, _ = risen(build, "ttft").decide()
    numbers = decision.evidence
    assert numbers["late"] == 0
    assert numbers["expected_per_second"] < 4.0 * CAPACITY
    assert decision.replicas >= numbers["requests_per_second"] / CAPACITY


@pytest.mark.parametrize(
    ("milliseconds", "window"), [(None, 60.0), (700.0, 60.7), (60_000.0, 120.0), (240_000.0, 300.0)]
)
def test_a_burst_that_may_wait_for_minutes_needs_less_beside_the_rate(
    fleet: Fleet, milliseconds: float | None, window: float
) -> None:
    """It is served while it waits, as far as the target lets it."""
    fleet.promise(Targets(milliseconds, 26.0))
    fleet.memory = fleet.memory._replace(course=Course(idc=9.0, idc_at=NOW))
    decision, _ = fleet.decide()
    found = re.search(r"([\d.]+) requests/s expected", decision.message)
    assert found is not None, decision.message
    assert float(found[1]) == pytest.approx(20.0 + 1.3 * sqrt(9.0 * 20.0 / window), rel=0.002)


def test_none_is_added_for_the_dead_band_beside_replicas_past_their_deadline(fleet: Fleet) -> None:
    """Six would do and the band keeps seven; two that are overdue are asked for anew, for six."""
    fleet.per_second = 5.7 * CAPACITY
    for age in (1400.0, 1400.0, 700.0, 700.0):
        fleet.pending(1, age=age, reason="ImagePullBackOff")
    decision, _ = fleet.decide()
    assert decision.evidence["recommended_replicas"] == 7
    assert decision.replicas == 8


def test_one_start_of_hours_hides_no_replica_that_does_not_come(fleet: Fleet) -> None:
    """A registry was away while it pulled."""
    fleet.per_second = 5.5 * CAPACITY
    fleet.pending(2, age=3700.0)
    fleet.memory = fleet.memory._replace(starts=((NOW - 9000.0, 7240.0),))
    assert fleet.decide()[0].replicas == 8


@pytest.mark.parametrize("broken", ["", "late", "violated"])
def test_none_is_added_for_a_rate_that_is_hardly_more_than_replicas_are_trusted_with(
    build: Any, broken: str
) -> None:
    fleet = Fleet(build, 4, 4.0 * CAPACITY)
    if broken == "violated":
        fleet.violated("ttft", "tpot")
    elif broken == "late":
        fleet.gauges |= {"waiting": 1, "oldest_waiting_seconds": 1.0}
    decision, _ = fleet.decide()
    found = re.search(r"([\d.]+) requests/s expected, ([\d.]+) per replica", decision.message)
    assert found is not None, decision.message
    assert 1.0 < float(found[1]) / float(found[2]) / 4.0 < 1.05
    assert decision.replicas == (5 if broken else 4)
    assert Fleet(build, 4, 4.3 * CAPACITY).decide()[0].replicas == 5


def test_a_few_late_ones_of_many_who_may_wait_long_do_not_make_it_more(build: Any) -> None:
    for milliseconds, load, want in ((700.0, 4.0, 5), (60_000.0, 4.04, 4)):
        fleet = Fleet(build, 4, load * CAPACITY)
        fleet.totals["received"] = 6000.0
        fleet.promise(Targets(milliseconds, 26.0))
        fleet.gauges |= {"waiting": 2, "oldest_waiting_seconds": 600.0}
        decision, _ = fleet.decide()
        found = re.search(r"([\d.]+) requests/s expected, ([\d.]+) per replica", decision.message)
        assert found is not None, decision.message
        assert 1.0 < float(found[1]) / float(found[2]) / 4.0 < 1.05
        assert 0 < decision.evidence["late"] < 50
        assert decision.replicas == want


@pytest.mark.parametrize(
    ("late", "percentile", "milliseconds", "want"),
    [
        pytest.param(4, 95, 700.0, 5, id="anybody where the target is short"),
        pytest.param(240, 95, 60_000.0, 4, id="no more than may be of those that came before"),
        pytest.param(264, 95, 60_000.0, 5, id="more than that"),
        pytest.param(60, 99, 60_000.0, 5, id="more than that of a higher percentile"),
    ],
)
def test_a_queue_is_drained_where_more_are_late_than_may_be(
    build: Any, late: int, percentile: int, milliseconds: float, want: int
) -> None:
    """A thousand requests came in the last ten seconds, and as many in the ten before, and so on."""
    fleet = Fleet(build, 4, 3.95 * CAPACITY)
    fleet.totals |= {"received": 30_000, "ttft_met": 400_000}
    fleet.target = replace(fleet.target, percentile=percentile)
    fleet.promise(Targets(milliseconds, 26.0))
    fleet.gauges |= {"waiting": late // 4, "oldest_waiting_seconds": milliseconds}
    decision, _ = fleet.decide()
    assert decision.evidence["late"] == late
    assert decision.replicas == want


def test_a_queue_of_which_few_are_late_is_drained_where_too_many_were(build: Any) -> None:
    """All have just missed the target, and so few wait for longer at any one moment."""
    for missed, want in (((), 4), (("ttft",), 7)):
        fleet = Fleet(build, 4, 3.8 * CAPACITY)
        fleet.totals |= {"received": 5000, "ttft_met": 400_000}
        fleet.promise(Targets(64_000.0, 26.0))
        fleet.violated(*missed)
        fleet.gauges |= {"waiting": 320, "oldest_waiting_seconds": 66.0}
        decision, _ = fleet.decide()
        assert 0 < decision.evidence["late"] < 0.05 * 5000 * 54 / 300
        assert decision.replicas == want


def test_a_queue_has_as_long_as_requests_may_wait(fleet: Fleet) -> None:
    for milliseconds, seconds in ((700.0, 45.0), (90_000.0, 90.0)):
        fleet.promise(Targets(milliseconds, 26.0))
        fleet.gauges |= {"waiting": 500, "oldest_waiting_seconds": 200.0}
        decision, _ = fleet.decide()
        numbers = decision.evidence
        spare = 4 * numbers["capacity_per_second"] - numbers["requests_per_second"]
        left = 2000 - spare * numbers["lead_seconds"]
        rate = numbers["requests_per_second"] + left / seconds
        assert decision.evidence["recommended_replicas"] == ceil(rate / numbers["capacity_per_second"])


def test_trust_that_was_just_lost_brings_replicas(build: Any) -> None:
    fleet = Fleet(build, 4, 4.0 * CAPACITY)
    for ago, want in ((10.0, 5), (90.0, 4)):
        fleet.memory = fleet.memory._replace(kappa_cut_at=NOW - ago)
        assert fleet.decide()[0].replicas == want


def test_of_a_large_fleet_no_more_than_one_is_spared(build: Any) -> None:
    for ready, share, spared in ((10, 1.01, True), (40, 1.01, True), (40, 1.03, False)):
        fleet = Fleet(build, ready, 1.0)
        most = fleet.decide()[0].evidence["capacity_per_second"] * ready
        fleet = Fleet(build, ready, share * most - 1.3 * sqrt(share * most / 60.7))
        assert (fleet.decide()[0].replicas == ready) == spared, (ready, share)

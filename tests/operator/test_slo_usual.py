"""What requests usually bring, and what of it a removal leaves room for."""

import json
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from random import Random
from typing import Any

import pytest
from tests.operator.law_fleet import CAPACITY, MODEL, NOW, Fleet

from headway_operator.slo import Memory
from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Workload
from headway_operator.slo.replicas import DEAD_BAND
from headway_operator.slo.usual import USUAL_SECONDS, Usual, drift, with_latest

WORK = Workload(1000.0, 2e6, 200.0, 1200.0, 0.0, 1000.0)
LONG = 2.0 * USUAL_SECONDS


def times(factor: float) -> Workload:
    """Prompts and answers so many times as long."""
    return replace(WORK, prompt=factor * WORK.prompt, answer=factor * WORK.answer)


def replica(work: Workload) -> Replica:
    return Replica(MODEL, work, 95.0, 1)


def test_it_is_the_mean_over_time_whatever_passes_are_apart() -> None:
    random = Random(1)
    passes = [(now := 0.0, 1.0)]
    while now < USUAL_SECONDS - 60.0:
        now += random.uniform(2.0, 40.0)
        passes.append((now, random.uniform(0.5, 2.0)))
    usual: Usual | None = None
    for at, factor in passes:
        usual = with_latest(usual, times(factor), at)
    steps = pairwise(passes)
    mean = sum((after - before) * factor for (before, _), (after, factor) in steps) / now
    assert usual is not None
    assert usual.workload.prompt == pytest.approx(mean * WORK.prompt)
    assert usual.workload.answer == pytest.approx(mean * WORK.answer)


def test_what_was_long_ago_is_forgotten() -> None:
    usual: Usual | None = None
    for at in range(0, 3000, 5):
        usual = with_latest(usual, times(2.0 if at < 1200 else 1.0), float(at))
        if at == 1195:
            assert usual.workload.prompt == pytest.approx(2.0 * WORK.prompt)
    assert usual is not None
    assert 1.0 < usual.workload.prompt / WORK.prompt < 1.06


def test_a_night_without_requests_changes_nothing(build: Any) -> None:
    """There are passes all night long; what came last was twice as long as usual."""
    fleet = with_usual(Fleet(build), 0.5)
    _, memory = fleet.decide()
    known = memory.usual
    assert known is not None
    assert known.workload.prompt > 0.5 * WORK.prompt
    for at in range(0, 3600, 20):
        _, memory = fleet.decided_with(memory._replace(slices=()), NOW + at)
    assert memory.usual == known
    assert memory.workload is not None
    later = with_latest(known, times(2.0), NOW + 3600.0)
    assert later.seconds == known.seconds + 60.0, "the first pass of the morning counts as a minute"


def test_a_clock_that_was_set_back_stops_nothing(build: Any) -> None:
    fleet = with_usual(Fleet(build), 1.5)
    _, memory = fleet.decide()
    _, after = fleet.decided_with(memory, NOW - 7200.0)
    assert after.usual == memory.usual, "no request of that time is known"
    assert memory.usual is not None
    usual = with_latest(memory.usual, WORK, NOW - 7200.0)
    assert usual == replace(memory.usual, at=NOW - 7200.0)
    assert with_latest(usual, WORK, NOW - 7170.0).workload.prompt < usual.workload.prompt


def test_a_new_revision_begins_anew(build: Any) -> None:
    fleet = with_usual(Fleet(build), 1.5)
    fleet.memory = fleet.memory._replace(revision="another")
    _, memory = fleet.decide()
    assert memory.usual == Usual(memory.workload, 0.0, NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "usually", "want"),
    [
        pytest.param(USUAL_SECONDS - 1.0, 1.3, None, id="not known for long enough"),
        pytest.param(LONG, 1.3, 0.3, id="more than now"),
        pytest.param(LONG, 0.7, 0.0, id="less than now"),
    ],
)
def test_drift(seconds: float, usually: float, want: float | None) -> None:
    found = drift(Usual(times(usually), seconds, NOW), replica(WORK))
    assert found == (None if want is None else pytest.approx(want))
    assert drift(None, replica(WORK)) is None


def with_usual(fleet: Fleet, usually: float) -> Fleet:
    fleet.memory = fleet.memory._replace(usual=Usual(times(usually), LONG, NOW - 5.0))
    return fleet


def most_taken(build: Any, ready: int, usually: float | None) -> float:
    """The highest rate for which one fewer is recommended, over what they would be trusted with."""
    low, high = 0.5, 1.2
    for _ in range(14):
        middle = (low + high) / 2.0
        fleet = Fleet(build, ready, middle * (ready - 1) * CAPACITY)
        decision, _ = (fleet if usually is None else with_usual(fleet, usually)).decide()
        is_less = decision.evidence["recommended_replicas"] < ready
        low, high = (middle, high) if is_less else (low, middle)
    return low


@pytest.mark.parametrize("ready", [2, 8])
def test_fewer_must_be_able_to_take_what_is_usual(build: Any, ready: int) -> None:
    """Bursts are added to the rate, and then the band, or by how much requests usually bring more."""
    shares = [most_taken(build, ready, one) for one in (None, 0.6, 1.0, 1.05, 1.3)]
    rates = [share * (ready - 1) * CAPACITY for share in shares]
    taken = [rate + 1.3 * sqrt(rate / 60.7) for rate in rates]
    assert taken[1:4] == [taken[0]] * 3, "no more than the band"
    assert taken[4] / taken[0] == pytest.approx((1.0 + DEAD_BAND) / 1.3, rel=0.003)


def test_it_is_told_and_outlives_a_restart(build: Any) -> None:
    decision, memory = with_usual(Fleet(build), 1.25).decide()
    assert decision.evidence["usual_work"] == pytest.approx(1.25, abs=0.01)
    assert memory.usual is not None
    assert memory.usual.at == NOW
    assert 1.2 * WORK.prompt < memory.usual.workload.prompt < 1.25 * WORK.prompt
    written = json.loads(json.dumps(memory.to_dict()))
    assert Memory.from_dict(written, NOW).usual == memory.usual
    del written["usual"]
    assert Memory.from_dict(written, NOW).usual is None, "of an earlier version"

"""Requests that come in groups: what waits for what, and that more replicas share it."""

import random
from collections import deque
from dataclasses import replace
from statistics import quantiles
from typing import Any

import pytest

from headway_operator.samples import Limits, Targets
from headway_operator.slo.capacity import Replica
from headway_operator.slo.evidence import Load
from headway_operator.slo.feasibility import infeasible
from headway_operator.slo.forecast import Course, Forecast, watched
from headway_operator.slo.memory import Memory
from headway_operator.slo.predictions import Factors, Workload
from headway_operator.slo.rate_change import Span
from headway_operator.slo.sizing import Sizing, sizing
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepFit, StepModel
from headway_operator.slo.target import Target
from headway_operator.slo.window import Recent
from headway_operator.state import NOT_PROMISED, Attainment

MODEL = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
WORK = Workload(prompt=1000.0, prompt_square=2e6, answer=200.0, context=1200.0, kv_share=0.002)
LIMITS = Limits(64, 2048)
PLAIN = Factors()
NOW = 100_000.0


def geometric(chance: random.Random, mean: float) -> int:
    """The size of a group, at least one."""
    size = 1
    while chance.random() > 1.0 / mean:
        size += 1
    return size


@pytest.mark.parametrize(("idc", "fleet"), [(3.0, 1), (9.0, 1), (9.0, 2), (9.0, 5), (30.0, 4)])
def test_of_a_group_each_replica_is_given_its_share(idc: float, fleet: int) -> None:
    """Groups with this index of dispersion, given out in turns."""
    chance = random.Random(3)
    before = [place // fleet for _ in range(20_000) for place in range(geometric(chance, (idc + 1.0) / 2.0))]
    found = Replica(MODEL, WORK, 95.0, fleet, burst=idc - 1.0).before
    assert found == pytest.approx(sum(before) / len(before), rel=0.06, abs=0.01)


@pytest.mark.parametrize("idc", [3.0, 9.0])
@pytest.mark.parametrize("use", [0.2, 0.5])
def test_what_a_group_waits_for_is_told(idc: float, use: float) -> None:
    """Prompts alone, one replica, against a queue of groups that is played through."""
    model = StepModel(base=1e-6, prefill=0.05, sequence=0.0, kv=0.0)
    work = Workload(prompt=1000.0, prompt_square=2e6, answer=1.0, context=1.0, kv_share=0.0)
    per_second = use / 0.05
    chance, at, free_at = random.Random(4), 0.0, 0.0
    mean, waited = (idc + 1.0) / 2.0, []
    for _ in range(40_000):
        at += chance.expovariate(per_second / mean)
        for _ in range(geometric(chance, mean)):
            free_at = max(at, free_at) + 0.05 * chance.expovariate(1.0)
            waited.append(1000.0 * (free_at - at))
    told = Replica(model, work, 95.0, burst=idc - 1.0).latencies(per_second, Limits(64, 100_000), PLAIN).ttft
    assert told == pytest.approx(quantiles(waited, n=20)[-1], rel=0.25)


def test_latencies_grow_with_bursts_and_fall_with_replicas_that_share_them() -> None:
    for name in ("ttft", "tpot", "kv_use"):
        alone = [
            getattr(Replica(MODEL, WORK, 95.0, burst=burst).latencies(1.0, LIMITS, PLAIN), name)
            for burst in (0.0, 1.0, 4.0, 16.0)
        ]
        assert alone == sorted(alone), name
        assert alone[0] < alone[-1], name
        shared = [
            getattr(Replica(MODEL, WORK, 95.0, fleet, burst=16.0).latencies(1.0, LIMITS, PLAIN), name)
            for fleet in (1, 2, 4, 16, 64)
        ]
        assert shared == sorted(shared, reverse=True), name
        assert shared[0] > shared[-1], name


def test_a_group_waits_for_few_places_too() -> None:
    """Long prompts on one place, where they take turns."""
    work = replace(WORK, prompt=20_000.0, prompt_square=4.4e8)
    few = Limits(1, 2048)
    calm, busy = (
        Replica(MODEL, work, 95.0, 2, burst=burst).latencies(0.1, few, PLAIN) for burst in (0.0, 4.0)
    )
    assert busy.ttft > 1.5 * calm.ttft


@pytest.fixture
def target(build: Any) -> Target:
    found: Target = build.target(targets=Targets(900.0, 60.0), initial=LIMITS)
    return found


def known(target: Target, idc: float, number: int, *, is_routed: bool = True) -> Sizing:
    each = {"prompts": 1.0, "prompt_sum": 1000.0, "prompt_squares": 2e6, "decoded": 200.0}
    each |= {"answers": 1.0, "answer_sum": 200.0, "attended": 2e5}
    told = {name: 1000.0 * value for name, value in each.items()}
    memory = Memory(fit=StepFit(model=MODEL), course=Course(idc=idc))
    happened = Recent([Slice(40.0, 100.0, told)])
    found = sizing(target, memory, happened, number, 100.0, is_routed=is_routed)
    assert found is not None
    return found


def test_each_of_more_replicas_does_more_where_bursts_are_shared(target: Target) -> None:
    calm, bursty = ([known(target, idc, n).capacity.per_second for n in (1, 2, 4, 8)] for idc in (1.0, 9.0))
    assert bursty == sorted(bursty)
    assert bursty[0] < 0.6 * calm[0]
    assert bursty[-1] > 0.9 * calm[-1]


def test_without_a_gateway_each_gets_its_part_by_chance(target: Target) -> None:
    blind, routed = (known(target, 9.0, 4, is_routed=one).replica for one in (False, True))
    assert blind.before == pytest.approx(1.0)
    assert routed.before < 0.75 * blind.before


def test_how_many_take_a_rate_hangs_on_how_many_share_it(target: Target) -> None:
    found = known(target, 9.0, 2)
    each = 1.05 * found.capacity.per_second
    assert not found.takes(target, 2, 2 * each)
    assert found.takes(target, 6, 6 * each)
    assert not found.takes(target, 6, 6.01 * found.bound)


@pytest.mark.parametrize("is_routed", [True, False])
def test_one_replica_knows_what_several_could_do(target: Target, *, is_routed: bool) -> None:
    found, several = (known(target, 9.0, number, is_routed=is_routed) for number in (1, 4))
    assert found.among(4) == several.replica
    assert several.among(1) == found.replica
    assert found.takes(target, 4, 3.5 * several.capacity.per_second)
    assert not found.takes(target, 1, 1.1 * found.capacity.per_second)


def test_a_doubt_about_long_prompts_is_none_about_bursts(build: Any) -> None:
    """TTFT is thought to be missed at any rate, because of a tail of prompts; what bursts alone break is
    believed, and of fewer replicas, too."""
    tight = build.target(targets=Targets(180.0, 60.0), initial=LIMITS)
    calm, shared, bursty = known(tight, 1.0, 1), known(tight, 9.0, 16), known(tight, 9.0, 1)
    assert calm.least_per_second == calm.capacity.per_second > 3.0 * bursty.least_per_second
    assert shared.least_per_second == shared.capacity.per_second
    assert calm.takes(tight, 1, calm.least_per_second)
    assert shared.takes(tight, 16, 16 * shared.least_per_second)
    assert not shared.takes(tight, 2, 2 * shared.least_per_second)


def course_of(counts: list[float]) -> Course:
    """Requests in each five seconds, one after another."""
    course, history = Course(), deque[Span](maxlen=60)
    for index, count in enumerate(counts):
        end = NOW + 5.0 * (index + 1)
        history.append(Span(end - 5.0, end, count))
        course = watched(course, list(history), end, 60.0)
    return course


def test_bursts_are_known_within_three_minutes() -> None:
    chance = random.Random(6)
    found = []
    for _ in range(50):
        groups = [sum(chance.random() < 0.01 for _ in range(100)) for _ in range(36)]
        found.append(course_of([20.0 * one for one in groups]).idc)
    assert sorted(found)[10] > 3.5


def test_a_step_is_no_burst() -> None:
    chance = random.Random(7)
    counts = [float(sum(chance.random() < 0.1 for _ in range(500))) for _ in range(90)]
    assert course_of(counts).idc < 1.6
    assert course_of([*counts, *(4.0 * one for one in counts[:6])]).idc < 3.0


def test_how_well_bursts_are_known_survives_a_checkpoint() -> None:
    course = course_of([50.0, 10.0] * 20)
    assert course.idc_bins == 13 - 2
    assert Course.from_dict(course.to_dict()) == course
    earlier = {key: value for key, value in course.to_dict().items() if key != "idc_bins"}
    assert Course.from_dict(earlier).idc_bins >= 20, "of a version that did not count them"


def test_a_promise_that_groups_alone_break_is_not_called_infeasible(build: Any) -> None:
    """TTFT is missed at two nearly idle replicas, where each request has more than one of its group before
    it; where they come one by one, that shows that no number would do."""
    tight = build.target(targets=Targets(120.0, 60.0), initial=LIMITS)
    missed = Attainment(120.0, 200.0, 900, 100, "violated")
    load, ahead = Load(), Forecast(0.5, 0.5, 1.0)
    words = [
        infeasible(tight, known(tight, idc, 2), load, ahead, 2, missed, NOT_PROMISED) for idc in (1.0, 9.0)
    ]
    assert "more replicas would not help" in words[0]
    assert words[1] == ""

"""Requests that come in groups: what waits for what, and that more replicas share it."""

import json
import random
from collections import deque
from dataclasses import replace
from statistics import quantiles
from typing import Any

import pytest
from tests.operator.law_fleet import CAPACITY, Fleet

from headway_operator.samples import Limits, Targets
from headway_operator.slo.capacity import Replica
from headway_operator.slo.evidence import Load
from headway_operator.slo.feasibility import infeasible
from headway_operator.slo.forecast import Course, Forecast
from headway_operator.slo.groups import Groups
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
    memory = Memory(fit=StepFit(model=MODEL), course=Course(groups=Groups(idc)))
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


@pytest.mark.parametrize("milliseconds", [110.0, 140.0, 180.0, 260.0, 900.0])
@pytest.mark.parametrize("number", [1, 4, 16])
def test_the_least_of_groups_changes_next_to_nothing(build: Any, milliseconds: float, number: int) -> None:
    """Also where nothing but a doubt says what a replica does."""
    tight = build.target(targets=Targets(milliseconds, 60.0), initial=LIMITS)
    calm, hardly = (known(tight, index, number).capacity.per_second for index in (1.0, 1.01))
    assert hardly == pytest.approx(calm, rel=0.06)


def seen(counts: list[float], seconds: float = 5.0) -> Groups:
    """Of requests in each pass, one after another."""
    found, history = Groups(), deque[Span](maxlen=60)
    for index, count in enumerate(counts):
        end = NOW + seconds * (index + 1)
        history.append(Span(end - seconds, end, count))
        found = found.seeing(list(history))
    return found


def by_chance(chance: random.Random, mean: float, number: int, size: int = 1) -> list[float]:
    """Counts of groups of one size that come by chance, as many as a mean on average."""
    share = mean / size / 1000.0
    return [float(size * sum(chance.random() < share for _ in range(1000))) for _ in range(number)]


@pytest.mark.parametrize(("size", "low", "high"), [(1, 1.0, 1.6), (8, 4.5, 12.0), (40, 20.0, 60.0)])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 15.0])
def test_groups_show_in_the_counts_of_passes(size: int, low: float, high: float, seconds: float) -> None:
    """Groups of one size that come by chance have just that index."""
    assert low <= seen(by_chance(random.Random(8), 40.0, 600, size), seconds).index < high


def test_groups_are_known_within_two_minutes() -> None:
    chance = random.Random(6)
    found = [seen(by_chance(chance, 20.0, 24, 20)).index for _ in range(50)]
    assert sorted(found)[10] > 4.0


@pytest.mark.parametrize("factor", [4.0, 0.125])
@pytest.mark.parametrize("before", [12, 90])
def test_a_step_is_no_group(factor: float, before: int) -> None:
    chance = random.Random(7)
    counts = by_chance(chance, 50.0, before) + by_chance(chance, 50.0 * factor, 6)
    assert seen(counts).index < (1.7 if before == 90 else 2.7)


def test_a_wave_of_half_a_minute_is_hardly_one() -> None:
    chance = random.Random(9)
    counts = [one for _ in range(20) for mean in (100.0, 33.0) for one in by_chance(chance, mean, 6)]
    bins = [sum(counts[at : at + 3]) for at in range(0, len(counts), 3)]
    assert seen(counts).index < 6.5 < 0.5 * seen(bins, 15.0).index


def test_before_the_first_request_there_was_no_load() -> None:
    assert seen([0.0] * 12 + [100.0] * 5).index == 1.0


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([Span(NOW, NOW + 5.0, 50.0)] * 2, id="two passes"),
        pytest.param([Span(NOW + 5 * k, NOW + 5 * k + 5, 0.3 * k) for k in range(3)], id="few requests"),
        pytest.param([Span(0.0, 5.0, 50.0), Span(5.0, 20.0, 9.0), Span(20.0, 25.0, 50.0)], id="uneven"),
    ],
)
def test_what_tells_nothing_of_groups_is_left_out(spans: list[Span]) -> None:
    assert Groups().seeing(spans).index == 1.0


def test_a_pass_counts_once() -> None:
    spans = [Span(0.0, 5.0, 10.0), Span(5.0, 10.0, 90.0), Span(10.0, 15.0, 10.0)]
    once = Groups().seeing(spans)
    assert once.index > 1.0
    assert once.seeing(spans) == once


def test_how_many_come_with_one_survives_a_checkpoint() -> None:
    course = Course(groups=seen([50.0, 10.0] * 20))
    assert Course.from_dict(json.loads(json.dumps(course.to_dict()))) == course
    earlier = {key: value for key, value in course.to_dict().items() if key != "groups"}
    assert Course.from_dict(earlier).groups == Groups(), "of a version that did not know"


@pytest.mark.parametrize(
    ("name", "value"), [("index", 0.5), ("index", 1e9), ("index", "nan"), ("number", -6), ("number", "inf")]
)
def test_damage_is_told(name: str, value: float) -> None:
    with pytest.raises(ValueError):
        Groups.from_dict({**Groups().to_dict(), name: float(value) if name == "index" else value})


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


@pytest.mark.parametrize(("index", "ready", "want"), [(1.0, 1, 4), (9.0, 1, 4), (9.0, 2, 4), (40.0, 2, 6)])
def test_the_fewest_are_asked_for_that_could_share_it(
    build: Any, index: float, ready: int, want: int
) -> None:
    """By what each does while there are one or two it would be three dozen; and the next pass finds as many
    enough."""
    for number in (ready, want):
        fleet = Fleet(build, number, 3.0 * CAPACITY)
        fleet.memory = fleet.memory._replace(course=Course(groups=Groups(index)))
        decision, _ = fleet.decide()
        assert want <= decision.replicas <= want + 1

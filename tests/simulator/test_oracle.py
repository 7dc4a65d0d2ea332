"""The oracle: it attains the objective, nothing fixed is cheaper, and its courses are the cheapest."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import Targets
from headway_operator.slo import target_of
from headway_runtime.config import Targets as EngineTargets
from headway_simulator import oracle as oracle_module
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.courses import Costs, cheapest_course
from headway_simulator.engine import Emitted, EngineSettings, SimulatedEngine
from headway_simulator.least_work import least_replica_seconds
from headway_simulator.limit_candidates import token_candidates
from headway_simulator.measures import Measures, measures
from headway_simulator.oracle import (
    BUDGET,
    LEAST_BUDGET,
    Ends,
    Oracle,
    budget_for,
    find_oracle,
    limits_beside,
)
from headway_simulator.records import Allowance, Flight
from headway_simulator.schedules import asked_seconds, schedule
from headway_simulator.trace import Arrival, Trace, part_of
from headway_simulator.work import guessed_batch, guessed_replicas

pytestmark = pytest.mark.long


def fixed(trace: Trace, setting: Setting, replicas: int) -> Measures:
    """What so many replicas all the time would have been worth."""
    setting = replace(setting, conditions=replace(setting.conditions, initial_replicas=replicas))
    run = Simulation(trace, setting, None).result()
    return measures(run, target_of(setting.service.spec), setting.engine.model.gpus)


def course_of(trace: Trace, setting: Setting, oracle: Oracle, course: tuple[int, ...]) -> Measures:
    """What another schedule than the oracle's would have been worth with its limits."""
    conditions = replace(setting.conditions, initial_replicas=course[0])
    limits = replace(
        setting.engine.limits,
        max_num_seqs=oracle.limits.max_num_seqs,
        max_num_batched_tokens=oracle.limits.max_num_batched_tokens,
    )
    setting = replace(setting, conditions=conditions, engine=replace(setting.engine, limits=limits))
    run = Simulation(trace, setting, schedule(course, oracle.limits, conditions)).result()
    return measures(run, target_of(setting.service.spec), setting.engine.model.gpus)


@pytest.mark.parametrize("cold_start_seconds", [20.0, 60.0])
def test_no_interval_of_the_oracle_can_do_with_one_replica_fewer(
    build: Any, cold_start_seconds: float
) -> None:
    slow = replace(build.model, prefill_token_milliseconds=0.4, decode_milliseconds=2.0)
    trace = build.load("flash", rate=1.6, seconds=300.0)
    setting = build.setting(cold_start_seconds=cold_start_seconds, engine={"model": slow})
    oracle = find_oracle(trace, setting, budget=100)
    assert oracle.is_attained
    assert not oracle.ended_by_budget
    for index, number in enumerate(oracle.replicas):
        fewer = (*oracle.replicas[:index], number - 1, *oracle.replicas[index + 1 :])
        if number > 1:
            found = course_of(trace, setting, oracle, fewer)
            # A replica that the next interval wants begins a pass later: the same schedule.
            is_better = found.replica_hours < 0.999 * oracle.measures.replica_hours
            assert not is_better or found.joint_attainment < 0.95, fewer


@pytest.mark.parametrize(
    ("ahead", "want"),
    [
        (0.0, 60.0 * (1 + 4 + 2)),
        (30.0, 60.0 * (1 + 4 + 2) + 30.0 * 3),  # three more are there half a minute earlier
        (90.0, 60.0 * (4 + 4 + 2)),
    ],
)
def test_what_a_schedule_asks_for_begins_so_much_earlier(ahead: float, want: float) -> None:
    assert asked_seconds((1, 4, 2), ahead) == pytest.approx(want)


def test_fewer_sequences_are_had_where_fewer_replicas_do(build: Any) -> None:
    """A step of n sequences takes 10 ms and one more for each: of 24 at once this target allows ten, and the
    others may wait."""
    service = build.service(ttftMilliseconds=8000, tpotMilliseconds=20)
    setting = replace(build.setting(), service=service)
    arrivals = tuple(Arrival(10.0 * burst, 50, 20) for burst in range(6) for _ in range(24))
    oracle = find_oracle(Trace("bursts", arrivals, 60.0), setting, budget=1)
    assert oracle.limits.max_num_seqs <= 8
    assert oracle.replicas == (1,)
    assert oracle.is_attained


def test_the_budgets_tried_have_those_of_steps_as_long_as_a_token_may_take(build: Any) -> None:
    """Beside all sequences that TPOT seems to allow, and half of them."""
    model = build.setting().engine.model
    target = target_of(build.service(ttftMilliseconds=8000, tpotMilliseconds=40).spec)
    candidates = token_candidates(model, target)
    most = target.highest.max_num_batched_tokens
    assert candidates[:4] == [most, most // 2, most // 4, most // 8]
    batch = guessed_batch(model, target)
    for seqs, tokens in zip((batch, round(0.5 * batch)), candidates[4:], strict=True):
        longest = 1000 * model.seconds(tokens - seqs, 0, seqs, 0)
        assert 0.9 * 40 < longest <= 0.95 * 40, (seqs, tokens)
    unbounded = target_of(build.service(ttftMilliseconds=8000, tpotMilliseconds=None).spec)
    assert token_candidates(model, unbounded) == candidates[:4]


def test_replicas_of_single_intervals_know_the_targets_as_those_of_whole_courses_do(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[EngineTargets | None] = []

    class Watched(Simulation[Any]):
        def __init__(self, trace: Trace, setting: Setting, controller: Any) -> None:
            if controller is None:
                alone.append(setting.engine.targets)
            super().__init__(trace, setting, controller)

    monkeypatch.setattr(oracle_module, "Simulation", Watched)
    setting = build.setting()
    find_oracle(build.load("poisson", rate=1.0, seconds=60.0), setting, budget=1)
    assert set(alone) == {EngineTargets(1000.0, 60.0)}
    engine = SimulatedEngine(replace(setting.engine, targets=alone[0]), 0.0, "seed")
    assert engine.metrics.targets == alone[0]


def test_what_comes_before_the_judged_time_warms_caches_and_costs_nothing(build: Any) -> None:
    """Three long prompts come again and again; each is late when it is computed whole."""
    blocks = 15_000 // 512
    arrivals = tuple(
        Arrival(6.0 * i, 15_000, 5, tuple(1000 * (i % 3) + block for block in range(blocks)))
        for i in range(20)
    )
    trace, setting = Trace("t", arrivals, 120.0), build.setting()
    cold = find_oracle(part_of(trace, 60.0, 120.0), setting)
    warm = find_oracle(trace, setting, judged_from_seconds=60.0)
    assert not cold.is_attained
    assert warm.is_attained
    assert warm.measures.num_arrivals == 10
    assert warm.replicas == (1,)
    assert warm.measures.replica_hours == pytest.approx(1 / 60)
    assert warm.least_replica_hours == pytest.approx(1 / 60)


def test_the_oracle_attains_the_objective_for_less_than_any_fixed_number(build: Any) -> None:
    slow = replace(build.model, prefill_token_milliseconds=0.4, decode_milliseconds=2.0)
    trace, setting = build.load("step", rate=0.8, seconds=300.0), build.setting(engine={"model": slow})
    told: list[float] = []
    oracle = find_oracle(trace, setting, told.append)
    assert oracle.is_attained
    assert oracle.measures.joint_attainment >= 0.95
    assert len(oracle.replicas) == 5
    assert max(oracle.replicas[2:]) > oracle.replicas[0]
    runs = (fixed(trace, setting, count) for count in range(1, 7))
    enough = next(one for one in runs if one.joint_attainment >= 0.95)
    assert oracle.measures.replica_hours < 0.9 * enough.replica_hours
    assert told[-1] == 1.0


def test_steady_loads_need_no_more_than_the_least_fixed_number(build: Any) -> None:
    trace, setting = build.load("poisson", rate=4.0, seconds=300.0), build.setting()
    oracle = find_oracle(trace, setting)
    assert oracle.is_attained
    runs = (fixed(trace, setting, count) for count in range(1, 7))
    enough = next(one for one in runs if one.joint_attainment >= 0.95)
    assert oracle.measures.replica_hours <= 1.001 * enough.replica_hours


def test_the_oracle_need_not_keep_a_fixed_number(build: Any) -> None:
    trace, setting = build.load("poisson", rate=1.0, seconds=120.0), build.setting(initial_replicas=5)
    spec = setting.service.spec.model_copy(update={"replicas": 5})
    setting = replace(setting, service=replace(setting.service, spec=spec))
    oracle = find_oracle(trace, setting)
    assert oracle.is_attained
    assert set(oracle.replicas) == {1}
    assert oracle.measures.mean_replicas == pytest.approx(1.0)


def test_what_nobody_can_attain_is_said(build: Any) -> None:
    """Prompts that take longer than the target even alone."""
    trace = Trace("t", tuple(Arrival(2.0 * i, 15_000, 5) for i in range(30)), 60.0)
    oracle = find_oracle(trace, build.setting())
    assert not oracle.is_attained
    assert oracle.measures.joint_attainment < 0.95


@pytest.mark.parametrize("price", [0.5, 3.0, 10.0, 100.0])
def test_a_course_is_the_cheapest_of_all(price: float) -> None:
    """Against every course there is, by brute force."""
    tables = [{1: 0}, {1: 40, 2: 9, 3: 0}, {2: 30, 3: 4, 4: 0}, {1: 2, 2: 0}, {2: 20, 3: 0}]
    counts = [10, 60, 50, 10, 40]
    costs = Costs(60.0, 20.0, price)

    def cost(course: tuple[int, ...]) -> float:
        missed = sum(
            table.get(min(number, max(table)), count)
            for number, table, count in zip(course, tables, counts, strict=True)
        )
        added = sum(max(0, after - before) for before, after in itertools.pairwise(course))
        return sum(course) * 60.0 + 20.0 * added + price * missed

    best = min(cost(course) for course in itertools.product(range(1, 5), repeat=5))
    assert cost(cheapest_course(tables, counts, range(1, 5), costs)) == pytest.approx(best)


def test_several_processes_find_the_same(build: Any) -> None:
    trace, setting = build.load("step", rate=1.0, seconds=180.0), build.setting()
    told: list[float] = []
    alone, together = (
        find_oracle(trace, setting, told.append, budget=6, num_processes=count) for count in (1, 3)
    )
    assert together == alone
    assert told[len(told) // 2 :] == told[: len(told) // 2]


def test_limits_may_be_found_beside(build: Any) -> None:
    trace, setting = build.load("step", rate=1.0, seconds=180.0), build.setting()
    with limits_beside(trace, setting) as limits:
        found = find_oracle(trace, setting, budget=1, limits=limits)
    assert found == find_oracle(trace, setting, budget=1)


def test_a_larger_budget_never_ends_with_a_dearer_schedule_nor_below_the_bound(build: Any) -> None:
    trace, setting = build.load("flash", rate=2.0, seconds=120.0), build.setting()
    ends: Ends = {}
    found = [find_oracle(trace, setting, ends=ends, budget=budget) for budget in (1, 2, 5)]
    hours = [one.measures.replica_hours for one in found if one.is_attained]
    assert hours
    assert hours == sorted(hours, reverse=True)
    attained = [one.is_attained for one in found]
    assert attained == sorted(attained)
    assert all(one.num_simulated <= budget for one, budget in zip(found, (1, 2, 5), strict=True))
    assert found[0].ended_by_budget
    least = {one.least_replica_hours for one in found}
    assert len(least) == 1
    assert 0 < least.pop() <= hours[-1]


def test_the_bound_is_the_work_that_must_be_done(build: Any) -> None:
    """Of a thousand requests the hundred dearest may miss, and a hundred may end after the load."""
    model = replace(build.model, prefill_token_milliseconds=1.0, prefill_context_milliseconds=0.01)
    model = replace(model, base_milliseconds=10.0, decode_milliseconds=1.0, decode_context_milliseconds=0.0)
    service = build.service(percentile=90)
    setting = replace(build.setting(engine={"model": model}), service=service)
    target = target_of(service.spec)
    shapes = [(float(at), 100) for at in range(8)] + [(8.0, 1000), (59.9, 100)]
    arrivals = tuple(Arrival(at, prompt, 11) for at, prompt in shapes for _ in range(100))
    # At most 32 rows share the base; of 60 ms it would be 50.
    answer = 10 * (1.0 + 10.0 / 32)
    prompt = 100 * 1.0 + 100 * 101 / 2 * 0.01
    found = least_replica_seconds(Trace("t", arrivals, 60.0), setting, target)
    assert found == pytest.approx(0.001 * 800 * (prompt + answer))
    tight = replace(target, targets=replace(target.targets, tpot_milliseconds=20.0))
    found = least_replica_seconds(Trace("t", arrivals, 60.0), setting, tight)
    assert found == pytest.approx(0.001 * 800 * (prompt + 10 * (1.0 + 10.0 / 10)))
    # With next to nothing to do there is still one replica.
    assert least_replica_seconds(Trace("t", arrivals[:3], 60.0), setting, target) == 60.0


def test_the_bound_has_blocks_that_were_seen_before_computed_once(build: Any) -> None:
    setting = build.setting(engine={"model": replace(build.model, prefill_context_milliseconds=0.0)})
    target = target_of(setting.service.spec)
    own = tuple(Arrival(0.0, 1024, 1, (2 * i, 2 * i + 1)) for i in range(2000))
    shared = tuple(Arrival(0.0, 1024, 1, (-1, i)) for i in range(2000))
    computed = 0.001 * 1900 * 0.1
    found = [least_replica_seconds(Trace("t", one, 60.0), setting, target) for one in (own, shared)]
    assert found == [pytest.approx(computed * 1024), pytest.approx(computed * 512)]


def test_more_work_is_guessed_to_need_more_replicas(build: Any) -> None:
    target = target_of(build.setting().service.spec)
    guesses = [guessed_replicas(build.model, build.load(rate=rate), target) for rate in (1.0, 8.0, 32.0)]
    assert guesses[0] == 1
    assert guesses[0] < guesses[1] < guesses[2]


def test_a_tighter_tpot_is_guessed_to_need_more_replicas(build: Any) -> None:
    """Its steps hold fewer sequences: a batch costs its base as often as it is smaller."""
    target = target_of(build.setting().service.spec)
    loose, tight, impossible = (
        guessed_batch(build.model, replace(target, targets=Targets(None, milliseconds)))
        for milliseconds in (60.0, 20.0, 1.0)
    )
    # A step takes 10 ms and one more for each sequence, and may take 0.8 of the target.
    assert (loose, tight, impossible) == (min(38, target.highest.max_num_seqs), 6, 1)


def test_what_is_known_sooner_is_not_found_otherwise(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules that have failed and minutes in which the rest is late are cut short, and replicas keep no
    metrics: without all that the oracle is the same, and takes longer."""
    slow = replace(build.model, prefill_token_milliseconds=0.4, decode_milliseconds=2.0)
    trace = build.load("flash", rate=1.6, seconds=90.0)
    setting = build.setting(engine={"model": slow})
    num_wakes = [0]
    wake = SimulatedEngine.wake

    def counted(self: SimulatedEngine) -> Emitted:
        num_wakes[-1] += 1
        return wake(self)

    monkeypatch.setattr(SimulatedEngine, "wake", counted)
    found = [find_oracle(trace, setting, budget=3)]
    for what, name in ((Allowance, "is_spent"), (Flight, "is_late")):
        num_wakes.append(0)
        monkeypatch.setattr(what, name, False if what is Allowance else lambda *_: False)
        found.append(find_oracle(trace, setting, budget=3))
    sampled = []

    def init(self: SimulatedEngine, settings: EngineSettings, *others: Any) -> None:
        sampled.append(settings.is_sampled)
        begin(self, replace(settings, is_sampled=True), *others)

    begin = SimulatedEngine.__init__
    monkeypatch.setattr(SimulatedEngine, "__init__", init)
    found.append(find_oracle(trace, setting, budget=3))
    assert not any(sampled)
    assert found == found[:1] * 4
    assert num_wakes[0] < num_wakes[1] < num_wakes[2]


def test_a_larger_load_has_a_smaller_budget_of_whole_runs(build: Any) -> None:
    def budget(count: int, prompt_tokens: int) -> int:
        return budget_for(Trace("t", (Arrival(0.0, prompt_tokens, 100),) * count, 60.0))

    assert budget(1000, 500) == BUDGET
    assert LEAST_BUDGET < budget(50_000, 500) < BUDGET
    assert budget(50_000, 500) > budget(50_000, 1_000) > LEAST_BUDGET
    assert budget(50_000, 100_000) == LEAST_BUDGET

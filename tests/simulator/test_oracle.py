"""The oracle: it attains the objective, nothing fixed is cheaper, and its courses are the cheapest."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.slo import target_of
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.courses import Costs, cheapest_course
from headway_simulator.measures import Measures, measures
from headway_simulator.oracle import find_oracle
from headway_simulator.trace import Arrival, Trace
from headway_simulator.work import guessed_replicas


def fixed(trace: Trace, setting: Setting, replicas: int) -> Measures:
    """What so many replicas all the time would have been worth."""
    setting = replace(setting, conditions=replace(setting.conditions, initial_replicas=replicas))
    run = Simulation(trace, setting, None).result()
    return measures(run, target_of(setting.service.spec), setting.engine.model.gpus)


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


def test_more_work_is_guessed_to_need_more_replicas(build: Any) -> None:
    guesses = [guessed_replicas(build.model, build.load(rate=rate)) for rate in (1.0, 8.0, 32.0)]
    assert guesses[0] == 1
    assert guesses[0] < guesses[1] < guesses[2]

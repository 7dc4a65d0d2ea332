"""The law's queue for places, held against simulated replicas: so much is served, and not much more."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import Limits
from headway_operator.slo import Target, target_of
from headway_operator.slo.best_limits import best_capacity
from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Capacity, Factors, Workload
from headway_operator.slo.step_fit import StepModel as Fitted
from headway_runtime.config import Limits as EngineLimits
from headway_runtime.config import Targets as EngineTargets
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.step_model import StepModel

# A prompt's token takes a tenth of a decode step, as on a processor.
MODEL = StepModel("prompts take long", 19.0, 1.6, 0.9, 64_000)
FLEET, SECONDS, PROMPT, ANSWER = 10, 300.0, 450, 43


@pytest.fixture
def setting(build: Any) -> Setting:
    slo = {"ttftMilliseconds": 2900, "tpotMilliseconds": 33}
    made: Setting = build.slow(model=MODEL, slo=slo, initial_replicas=FLEET)
    return made


@pytest.fixture
def told(setting: Setting) -> Capacity:
    work = Workload(float(PROMPT), float(PROMPT) ** 2, float(ANSWER), PROMPT + ANSWER / 2, 0.01)
    replica = Replica(Fitted(19.0, 1.6, 0.9, 0.0), work, 95.0, FLEET)
    return best_capacity(replica, target_of(setting.service.spec), Factors())


def attained(build: Any, setting: Setting, per_second: float, limits: Limits) -> float:
    """The share of requests that meet both targets on replicas that know them."""
    target: Target = target_of(setting.service.spec)
    ttft, tpot = target.targets.ttft_milliseconds, target.targets.tpot_milliseconds
    engine = replace(
        setting.engine,
        limits=EngineLimits(limits.max_num_seqs, limits.max_num_batched_tokens),
        targets=EngineTargets(ttft, tpot),
    )
    load = build.steps((SECONDS, FLEET * per_second), prompt=PROMPT, output=ANSWER)
    flights = Simulation(load, replace(setting, engine=engine), None).result().flights
    return sum(one.meets(ttft, tpot) for one in flights) / len(flights)


def test_requests_that_take_turns_are_served_as_told(build: Any, setting: Setting, told: Capacity) -> None:
    assert told.limits.max_num_seqs == 1
    assert attained(build, setting, told.per_second, told.limits) >= 0.95
    assert attained(build, setting, 1.3 * told.per_second, told.limits) < 0.95


def test_with_a_place_for_each_so_many_are_not(build: Any, setting: Setting, told: Capacity) -> None:
    many = replace(told.limits, max_num_seqs=target_of(setting.service.spec).highest.max_num_seqs)
    assert attained(build, setting, told.per_second, many) < 0.95

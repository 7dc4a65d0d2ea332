"""Whole simulations with and without steps taken over at once: a controller, arrivals, deaths, ties."""

import random
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.slo import decide, resume
from headway_runtime.config import Limits
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.control import Controller
from headway_simulator.records import Run
from headway_simulator.trace import Arrival, Trace


def test_a_service_met_by_many_at_the_same_moment_does_the_same_with_and_without(build: Any) -> None:
    """Whole simulations, with a controller that moves limits and replicas."""
    chance = random.Random(1)
    arrivals = [
        Arrival(
            3.0 * (number // 6),
            chance.choice([40, 700, 3_000, 12_000]),
            chance.choice([1, 20, 200]),
            tuple(range(chance.choice([0, 0, 40, 100]))),
            64,
        )
        for number in range(240)
    ]
    trace = Trace("bunches", tuple(arrivals), 120.0)
    fast, slow = (run_of(trace, build.setting(engine={"fast_forwards": one})) for one in (True, False))
    assert fast == slow
    assert {one.replicas for one in fast.passes} > {1}
    assert len({one.limits for one in fast.passes}) > 1


@pytest.mark.parametrize("seed", range(3))
def test_of_a_replica_that_dies_what_it_has_computed_is_counted(build: Any, seed: int) -> None:
    arrivals = tuple(Arrival(2.0 * number, 12_000, 50, tuple(range(60)), 64) for number in range(40))
    fast, slow = (
        run_of(
            Trace("long", arrivals, 100.0),
            build.setting(
                engine={"fast_forwards": one, "limits": Limits(8, 64)},
                deaths_per_pod_hour=200.0,
                initial_replicas=2,
                seed=seed,
            ),
        )
        for one in (True, False)
    )
    assert any(one.fate == "lost" for one in slow.flights)
    assert fast == slow


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_at_the_moment_a_turn_begins_comes_before_it(build: Any, seed: int) -> None:
    """Steps of a 32nd of a second, and arrivals at whole numbers of them."""
    times = ("base", "prefill_token", "prefill_context", "decode", "decode_context")
    model = replace(build.model, **{f"{name}_milliseconds": 31.25 * (name == "base") for name in times})
    chance = random.Random(seed)
    moments = sorted(chance.randrange(320) / 32 for _ in range(40))
    arrivals = tuple(Arrival(at, chance.choice([40, 3_000]), chance.choice([1, 20])) for at in moments)
    fast, slow = (
        run_of(Trace("t", arrivals, 20.0), build.setting(engine={"fast_forwards": one, "model": model}))
        for one in (True, False)
    )
    assert fast == slow


def run_of(trace: Trace, setting: Setting) -> Run:
    controller = Controller("headway", lambda sample, now: resume(None, sample, now), decide)
    return Simulation(trace, setting, controller).result()

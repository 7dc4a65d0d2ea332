"""The shipped law in the simulator: what it learns there, and courses that the law before it got wrong."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headway_operator.samples import Sample
from headway_operator.slo import Memory, Target, decide, resume, target_of
from headway_operator.state import Decision, Observed
from headway_simulator.cluster import Simulation
from headway_simulator.control import Controller, headway
from headway_simulator.measures import measures, reversals


def listening(decisions: list[Decision]) -> Controller[Memory]:
    """The shipped controller; `decisions` gets what it decides."""

    def listened(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        decision, memory = decide(target, memory, sample, observed, now)
        decisions.append(decision)
        return decision, memory

    return Controller("headway", lambda sample, now: resume(None, sample, now), listened)


def test_the_step_model_of_the_simulation_is_found(build: Any) -> None:
    decisions: list[Decision] = []
    Simulation(
        build.load(rate=3.0, seconds=150.0), build.setting(initial_replicas=2), listening(decisions)
    ).result()
    numbers = decisions[-1].evidence
    # What prompts attend to is no term of the model; it goes to the others.
    assert numbers["step_base_milliseconds"] == pytest.approx(build.model.base_milliseconds, rel=0.1)
    assert numbers["step_prefill_token_milliseconds"] == pytest.approx(0.1, rel=0.1)
    assert numbers["step_sequence_milliseconds"] == pytest.approx(1.0, rel=0.25)
    assert numbers["step_residual"] < 0.1


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_steps_that_are_told_wrong_are_put_right_by_what_requests_see(build: Any, error: float) -> None:
    load, setting = build.load(rate=3.0, seconds=150.0), build.setting(initial_replicas=2)
    course = build.course(load, setting, build.telling_steps(error))
    course.run()
    numbers = course.decisions[-1].evidence
    assert numbers["step_pace"] == pytest.approx(1.0 / error, rel=0.1)
    assert numbers["step_base_milliseconds"] == pytest.approx(build.model.base_milliseconds, rel=0.2)


def test_bursts_that_miss_tpot_never_starve_prompts_of_tokens(build: Any) -> None:
    """Gaps vary three times as much as their mean: a budget lowered for TPOT would let TTFT collapse."""
    trace = build.load("gamma", rate=5.0, seconds=300.0)
    setting = build.setting(initial_replicas=2)
    run = Simulation(trace, setting, headway()).result()
    assert measures(run, target_of(setting.service.spec), 1).ttft_attainment > 0.9


def test_replicas_follow_a_step_and_turn_back_once_at_most(build: Any) -> None:
    trace = build.load("step", rate=2.0, seconds=240.0)
    setting = build.setting()
    run = Simulation(trace, setting, headway()).result()
    jump = run.starts_at + (trace.step_at_seconds or 0.0)
    raised_at = next(b.at for a, b in pairwise(run.passes) if b.at > jump and b.replicas > a.replicas)
    assert raised_at - jump <= 15.0
    after = [one.replicas for one in run.passes if one.at >= jump]
    # What the queue of the first moments asked for may be let go once, and is not asked for again.
    assert reversals(b - a for a, b in pairwise(after)) <= 1
    found = measures(run, target_of(setting.service.spec), 1, trace.step_at_seconds)
    assert found.recovery_seconds is not None


def test_a_fifth_of_samples_lost_costs_little(build: Any) -> None:
    trace = build.load(rate=4.0, seconds=150.0)
    setting = build.setting(initial_replicas=2)
    lossy = replace(setting, conditions=replace(setting.conditions, missing_samples=0.2))
    target = target_of(setting.service.spec)
    whole, part = (
        measures(Simulation(trace, one, headway()).result(), target, 1) for one in (setting, lossy)
    )
    assert part.joint_attainment > whole.joint_attainment - 0.02

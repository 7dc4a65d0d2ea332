"""A step model fitted to what a real engine tells of its steps."""

from dataclasses import astuple, replace
from typing import Any

import pytest
from benchmarks.slo.fit import fit

from headway_operator.samples import Limits, Moments, ReplicaSample, Sample, Targets
from headway_operator.slo import Target
from headway_operator.state import Attainment, Decision, Observed
from headway_runtime.step_moments import StepMoments
from headway_simulator.cluster import Simulation
from headway_simulator.control import Controller
from headway_simulator.step_model import StepModel


def test_a_step_model_is_found_again_in_what_an_engine_tells_of_its_steps(build: Any) -> None:
    seen: list[Sample] = []

    def decide(
        target: Target, memory: None, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, None]:
        seen.append(sample)
        unknown = Attainment(None, None, 0, 0, "unknown")
        return Decision(now, 1, target.initial, "Fixed", "", "", unknown, unknown, {}), None

    model = StepModel("m", 10.0, 0.1, 1.0, 64_000, decode_context_milliseconds=0.002)
    setting = build.setting(engine={"model": model, "overlaps": False})
    Simulation(build.load(seconds=120.0), setting, Controller("c", lambda sample, now: None, decide)).result()
    samples = [one for sample in seen[1:] if (one := sample.replicas["pod-1"]) is not None]
    found = fit("m", [samples], 3.0)
    assert found.relative_error < 1e-3
    assert found.num_steps > 100
    assert found.model.base_milliseconds == pytest.approx(10.0, rel=0.001)
    assert found.model.prefill_token_milliseconds == pytest.approx(0.1, rel=0.001)
    assert found.model.decode_milliseconds == pytest.approx(1.0, rel=0.01)
    assert found.model.decode_context_milliseconds == pytest.approx(0.002, rel=0.01)
    assert found.model.delivery_milliseconds == 3.0
    assert found.model.kv_cache_tokens == 64_000


EMPTY = ReplicaSample("m", 0.0, *(Limits(64, 2048),) * 2, Targets(), 0, 0, 0.0, 0, 64, False, {}, {})


def told(moments: StepMoments) -> ReplicaSample:
    return replace(EMPTY, moments=Moments(*astuple(moments.snapshot())))


def test_what_prompts_attend_to_is_found_though_no_step_tells_it() -> None:
    """Prompts are counted when they begin, samples come in between, two are computed in one step, and one in
    two chunks."""
    moments = StepMoments()
    samples, decode = [told(moments)], StepModel("m", 17.0, 1.4, 1.5, 1024, 5e-4)
    for begun, steps in (([64], [64]), ([200, 500], [700]), ([1000], [600, 400]), ([500], [500])) * 3:
        for tokens in begun:
            moments.prompt(tokens)
        samples.append(told(moments))
        pairs = sum(tokens * (tokens + 1) // 2 for tokens in begun)
        for index, tokens in enumerate(steps):
            moments.step(1000 * decode.seconds(tokens, 0 if index else pairs, 1, 300), tokens, 1, 300)
            samples.append(told(moments))
        for decodes in (1, 2, 4):
            moments.step(1000 * decode.seconds(0, 0, decodes, 300 * decodes), 0, decodes, 300 * decodes)
            samples.append(told(moments))
    found = fit("m", [samples[:30], samples[29:]], 0.0).model
    assert found.base_milliseconds == pytest.approx(17.0, rel=1e-3)
    assert found.prefill_token_milliseconds == pytest.approx(1.4, rel=1e-3)
    assert found.prefill_context_milliseconds == pytest.approx(5e-4, rel=1e-3)
    assert found.decode_milliseconds == pytest.approx(1.5, rel=1e-3)


def test_a_fit_without_prompts_or_with_one_that_never_ends_says_what_it_needs() -> None:
    moments = StepMoments()
    samples = [told(moments)]
    moments.step(20.0, 0, 1, 100)
    moments.prompt(200)
    moments.step(200.0, 100, 1, 100)
    samples.append(told(moments))
    with pytest.raises(ValueError, match="send more requests"):
        fit("m", [samples], 0.0)


def test_a_fit_of_which_most_prompts_cannot_be_counted_is_refused() -> None:
    moments = StepMoments()
    samples = [told(moments)]
    for index in range(10):
        moments.prompt(200)
        moments.step(200.0, 200, 1, 100)
        moments.step(20.0, 0, 1, 100)
        if index == 3:
            moments.step(200.0, 200, 1, 100)  # computed again
        samples.append(told(moments))
    with pytest.raises(ValueError, match="of 11 steps with prompts only 3 can be counted"):
        fit("m", [samples], 0.0)


def test_no_coefficient_of_a_fit_is_negative() -> None:
    """Steps of which those with more sequences were shorter."""
    moments = StepMoments()
    samples = [told(moments)]
    for prompt, decodes, milliseconds in ((100, 1, 30.0), (100, 8, 20.0), (200, 4, 40.0), (50, 2, 15.0)):
        moments.prompt(prompt)
        moments.step(milliseconds, prompt, decodes, 100 * decodes)
        moments.step(milliseconds, 0, decodes, 100 * decodes)
        samples.append(told(moments))
    found = fit("m", [samples], 0.0).model
    assert found.decode_milliseconds == 0.0
    assert min(found.base_milliseconds, found.prefill_token_milliseconds) >= 0.0

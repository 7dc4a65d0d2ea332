"""A step model fitted to what a real engine tells of its steps."""

from dataclasses import astuple, replace
from typing import Any

import pytest
from benchmarks.slo.fit import fit

from headway_operator.samples import Limits, Moments, ReplicaSample, Sample, Targets
from headway_operator.slo import Target
from headway_operator.state import Attainment, Decision, Observed
from headway_runtime.prompt_cost import PromptCost
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

    model = StepModel("m", 10.0, 0.1, 1.0, 64_000, 4e-5, decode_context_milliseconds=0.002)
    setting = build.setting(engine={"model": model, "overlaps": False})
    Simulation(build.load(seconds=120.0), setting, Controller("c", lambda sample, now: None, decide)).result()
    samples = [one for sample in seen[1:] if (one := sample.replicas["pod-1"]) is not None]
    found = fit("m", [samples], 3.0, model.doubling_context)
    assert found.relative_error < 1e-3
    assert found.num_steps > 100
    assert found.model.base_milliseconds == pytest.approx(10.0, rel=0.001)
    assert found.model.prefill_token_milliseconds == pytest.approx(0.1, rel=0.005)
    assert found.model.prefill_context_milliseconds == pytest.approx(4e-5, rel=0.02)
    assert found.model.decode_milliseconds == pytest.approx(1.0, rel=0.01)
    assert found.model.decode_context_milliseconds == pytest.approx(0.002, rel=0.01)
    assert found.model.delivery_milliseconds == 3.0
    assert found.model.kv_cache_tokens == 64_000


EMPTY = ReplicaSample("m", 0.0, *(Limits(64, 2048),) * 2, Targets(), 0, 0, 0.0, 0, 64, False, {}, {})
COST = PromptCost(3000)


class Engine:
    """What one tells that computes such steps."""

    def __init__(self) -> None:
        self.moments = StepMoments()
        self.counters = dict.fromkeys(("prompt_tokens", "preemptions", "aborted", "steps"), 0)

    def prompt_step(self, milliseconds: float, start: int, num_tokens: int, decodes: int = 1) -> None:
        self.moments.step(milliseconds, COST.of(start, num_tokens), decodes, 300 * decodes)
        self.counters["prompt_tokens"] += num_tokens
        self.counters["steps"] += 1

    def decode_step(self, milliseconds: float, decodes: int) -> None:
        self.moments.step(milliseconds, 0, decodes, 300 * decodes)
        self.counters["steps"] += 1

    def told(self) -> ReplicaSample:
        moments = Moments(*astuple(self.moments.snapshot()))
        return replace(EMPTY, counters=dict(self.counters), moments=moments)


def test_what_prompts_attend_to_is_found_in_what_they_cost() -> None:
    """With a doubling context that is not what the model says: it only tells pairs apart."""
    engine, model = Engine(), StepModel("m", 17.0, 1.4, 1.5, 1024, 5e-4)
    samples = [engine.told()]
    for start, num_tokens in ((0, 64), (0, 700), (0, 600), (600, 400), (0, 500), (1200, 30)) * 3:
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        engine.prompt_step(1000 * model.seconds(num_tokens, pairs, 1, 300), start, num_tokens)
        samples.append(engine.told())
        for decodes in (1, 2, 4):
            engine.decode_step(1000 * model.seconds(0, 0, decodes, 300 * decodes), decodes)
            samples.append(engine.told())
    found = fit("m", [samples[:30], samples[29:]], 0.0, COST.doubling_context).model
    assert found.base_milliseconds == pytest.approx(17.0, rel=0.02)
    assert found.prefill_token_milliseconds == pytest.approx(1.4, rel=0.01)
    assert found.prefill_context_milliseconds == pytest.approx(5e-4, rel=0.02)
    assert found.decode_milliseconds == pytest.approx(1.5, rel=0.02)


def test_a_fit_without_prompts_says_what_it_needs() -> None:
    engine = Engine()
    samples = [engine.told()]
    engine.decode_step(20.0, 1)
    samples.append(engine.told())
    with pytest.raises(ValueError, match="send more requests"):
        fit("m", [samples], 0.0, COST.doubling_context)


@pytest.mark.parametrize(
    ("counter", "error"),
    [
        ("preemptions", "preemptions: 2, .*send fewer at once"),
        ("aborted", "aborted: 2, .*let all requests end"),
        ("steps", "2 steps had guesses; turn speculation off"),
    ],
)
def test_a_run_whose_sums_are_of_other_tokens_than_its_counters_is_refused(counter: str, error: str) -> None:
    """Also where it shows in a time without prompts."""
    engine = Engine()
    samples = [engine.told()]
    for _ in range(3):
        engine.prompt_step(200.0, 0, 200)
        samples.append(engine.told())
        engine.decode_step(20.0, 1)
        samples.append(engine.told())
    fit("m", [samples], 0.0, COST.doubling_context)
    engine.decode_step(20.0, 1)
    engine.counters[counter] += 2
    with pytest.raises(ValueError, match=error):
        fit("m", [[*samples, engine.told()]], 0.0, COST.doubling_context)


def test_no_coefficient_of_a_fit_is_negative() -> None:
    """Steps of which those with more sequences were shorter."""
    engine = Engine()
    samples = [engine.told()]
    for prompt, decodes, milliseconds in ((100, 1, 30.0), (100, 8, 20.0), (200, 4, 40.0), (50, 2, 15.0)):
        engine.prompt_step(milliseconds, 0, prompt, decodes)
        engine.decode_step(milliseconds, decodes)
        samples.append(engine.told())
    found = fit("m", [samples], 0.0, COST.doubling_context).model
    assert found.decode_milliseconds == 0.0
    assert min(found.base_milliseconds, found.prefill_token_milliseconds) >= 0.0

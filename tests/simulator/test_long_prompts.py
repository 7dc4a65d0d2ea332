"""Prompts whose tokens attend to tens of thousands: steps beside decodes stay as long as they were."""

from dataclasses import replace
from typing import Any

import pytest

from headway_runtime.config import Limits
from headway_runtime.request import Request, SamplingParams
from headway_simulator.engine import EngineSettings, SimulatedEngine
from headway_simulator.step_model import StepModel
from headway_simulator.trace import Arrival, Trace

# A token that attends to 10,000 takes as long as two that attend to nothing.
MODEL = StepModel("m", 8.0, 0.05, 0.25, 200_000, prefill_context_milliseconds=5e-6)
LONG = 60_000


def longest_step(model: StepModel, num_batched_tokens: int) -> tuple[float, int]:
    """Milliseconds of the longest step that somebody decodes in while a prompt is computed, and how many
    steps that takes."""
    settings = EngineSettings(model=model, max_model_len=LONG + 100, limits=Limits(4, num_batched_tokens))
    engine = SimulatedEngine(replace(settings, fast_forwards=False), 0.0, "seed")
    engine.add(Request("decodes", (1,) * 8, SamplingParams(max_tokens=5000), 0.0), 3, 0.0)
    for _ in range(4):
        engine.wake()
    engine.add(Request("long", (2,) * LONG, SamplingParams(max_tokens=2), 0.0), 3, engine.wakes_at)
    longest, num_steps = 0.0, 0
    while True:
        begins_at = engine.wakes_at
        first = engine.wake().first
        longest = max(longest, 1000 * (engine.wakes_at - begins_at))
        num_steps += 1
        if first:
            return longest, num_steps


def test_no_step_is_longer_at_the_end_of_a_prompt_than_at_its_beginning() -> None:
    num_tokens = 512
    allowed = 8.0 + 0.25 + 0.05 * num_tokens
    longest, num_steps = longest_step(MODEL, num_tokens)
    assert allowed * 0.95 < longest < allowed * 1.01
    # Without attention's time there would be 118, with it as many more as tokens cost more on average.
    assert 118 * 3.5 < num_steps < 118 * 4.5


def test_without_what_prompts_attend_to_a_step_holds_its_tokens() -> None:
    longest, num_steps = longest_step(replace(MODEL, prefill_context_milliseconds=0.0), 512)
    assert longest == pytest.approx(8.0 + 0.25 + 0.05 * 511, rel=0.01)
    assert num_steps in range(118, 121)


def test_long_prompts_break_no_tpot_and_need_no_small_steps(build: Any) -> None:
    """A third of the requests has 12,000 tokens, the last of which take seven times as long as the first."""
    model = replace(build.model, prefill_context_milliseconds=5e-5)
    arrivals = (Arrival(1.5 * at, 12_000 if at % 3 == 2 else 200, 60) for at in range(400))
    service = build.service(
        {"maxReplicas": 16},
        {"maxNumBatchedTokens": {"max": 1024}},
        ttftMilliseconds=30_000,
        tpotMilliseconds=40,
    )
    setting = replace(build.setting(engine={"model": model, "limits": Limits(32, 1024)}), service=service)
    course = build.course(Trace("long", tuple(arrivals), 600.0), setting)
    flights = course.run().flights
    assert all(one.meets(30_000, 40) for one in flights[200:])
    # What 0.95 of the target leaves of a step is 28 ms, at 0.1 ms a token.
    assert 220 <= course.decisions[-1].limits.max_num_batched_tokens <= 280

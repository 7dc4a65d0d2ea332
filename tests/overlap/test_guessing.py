"""Guessing while steps overlap: it comes and goes, and the answers are those of an engine without both."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime_core.judged_trajectory import WaveringPolicy

from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.inprocess import Engine
from headway_runtime.request import Grammar
from headway_runtime.sampling_params import SamplingParams

MODEL = "bundled://headway-tiny"
METHODS: dict[str, dict[str, object]] = {
    "draft model": {"model": "bundled://headway-tiny-draft", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
}
PROMPTS = [
    "one two three one two three one two",
    "one two three one two three one two",
    "Tom and Anna went to the",
    "What is 12 + 30?",
    "Once upon a time",
]
PARAMS = [
    SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=120),
    SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=90, presence_penalty=0.1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=60, top_p=0.95),
    SamplingParams(temperature=0.8, seed=6, max_tokens=30, logprobs=2),
    SamplingParams(temperature=0.5, seed=7, max_tokens=60, stop=["two"]),
]
GRAMMAR = SamplingParams(temperature=0.0, max_tokens=24, grammar=Grammar("regex", "[a-z ]{3,12}"))


def answers(params: list[SamplingParams], **options: Any) -> tuple[list[Any], Engine]:
    with Engine(MODEL, max_model_len=256, max_num_seqs=4, num_threads=1, **options) as engine:
        done = engine.generate(PROMPTS, params, use_tqdm=False)
    return [one.outputs for one in done], engine


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("params", [PARAMS, [*PARAMS[:4], GRAMMAR]], ids=["free", "with a grammar"])
def test_answers_are_those_without_guesses_and_without_overlap(
    params: list[SamplingParams], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, _ = answers(params)
    policies: list[WaveringPolicy] = []

    def wavering(*, is_adaptive: bool) -> WaveringPolicy:
        assert is_adaptive
        policies.append(WaveringPolicy())
        return policies[-1]

    monkeypatch.setattr("headway_runtime.engine.DraftPolicy", wavering)
    got, engine = answers(params, overlap=True, speculative_config=METHODS[method])
    assert got == want
    assert policies[0].num_blind >= 10, "no step was launched over another one"
    drafts = engine.metrics().drafts
    assert drafts.num_accepted > 3
    assert drafts.num_accepted == sum(drafts.accepted_at) <= drafts.num_tokens


def test_an_adaptive_engine_overlaps_while_its_guesses_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it knows no step's time, nothing but tries is worth it."""
    blind: list[bool] = []
    lengths = DraftPolicy.lengths

    def noted(policy: DraftPolicy, *arguments: Any, is_blind: bool = False) -> list[int]:
        blind.append(is_blind)
        return lengths(policy, *arguments, is_blind=is_blind)

    monkeypatch.setattr(DraftPolicy, "lengths", noted)
    monkeypatch.setattr(DraftPolicy, "observe_step", lambda policy, rows, seconds: None)
    params = [SamplingParams(temperature=1.0, seed=seed, ignore_eos=True, max_tokens=60) for seed in range(5)]
    want, _ = answers(params)
    got, _ = answers(params, overlap=True, speculative_config=METHODS["ngram"])
    assert got == want
    assert sum(blind) > 0.8 * len(blind) > 50
    assert not all(blind), "a try is made with the tokens before it known"

"""What a draft model's guesses took is told of the step in which they were made, and of no other."""

from typing import Any

import pytest

from headway_runtime import Engine, SamplingParams
from headway_runtime.draft_policy import DraftPolicy

PROMPT = "Once upon a time there was a little dog who lived in a big house. " * 3


def test_catching_up_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    caught_up: list[float] = []
    guessing: list[int] = []
    observe, lengths = DraftPolicy.observe_catch_up, DraftPolicy.lengths

    def observed(policy: DraftPolicy, num_sequences: int, seconds: float) -> None:
        caught_up.append(seconds)
        observe(policy, num_sequences, seconds)

    def chosen(policy: DraftPolicy, *arguments: Any, **named: Any) -> list[int]:
        found = lengths(policy, *arguments, **named)
        # Two tokens in the third step of each ten, so that there are steps with and without.
        guessing.append(2 if len(guessing) % 10 == 2 else 0)
        return [guessing[-1]] * len(found)

    monkeypatch.setattr(DraftPolicy, "observe_catch_up", observed)
    monkeypatch.setattr(DraftPolicy, "lengths", chosen)
    draft = {"model": "bundled://headway-tiny-draft", "num_speculative_tokens": 2}
    with Engine("bundled://headway-tiny", max_model_len=512, speculative_config=draft) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        engine.generate(PROMPT, params, use_tqdm=False)
    assert sum(map(bool, guessing)) >= 3
    assert 1 <= len(caught_up) <= sum(map(bool, guessing))
    # Whatever is told is a measure of its own.
    assert len({*caught_up}) == len(caught_up)

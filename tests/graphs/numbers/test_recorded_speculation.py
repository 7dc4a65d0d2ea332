"""Steps that check guesses, and passes of the model that guesses, replayed: the tokens of plain steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits, SpeculativeConfig
from headway_runtime.draft_passes import run_ahead
from headway_runtime.graphs.forms import StepForm
from headway_runtime.models.decoder import Decoder

GUESSES = 2
LIMITS = {"envelope": Envelope(2, 64, GUESSES), "limits": Limits(2, 64, GUESSES)}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5, "temperature": 0.9, "top_k": 40},
    # Something that is guessed often, and right.
    "repeating": {"temperature": 0.0, "logit_bias": ((8, 100.0),)},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2},
    "min tokens": {"seed": 4, "min_tokens": 4, "stop_token_ids": frozenset(range(0, 330, 3))},
}
MIXES = {
    "alone": ["greedy"],
    "plain": ["greedy", "drawn"],
    "edited": list(ASKED)[:4],
    "stops": ["min tokens"],
}


@pytest.fixture
def guessing(start: Callable[..., Any], write_model: Callable[..., Path]) -> Callable[..., Any]:
    """guessing(method, **changes): an engine whose draft model, if it has one, is the model itself."""
    folder = write_model()

    def make(method: str, draft: Path | None = None, **changes: Any) -> Any:
        if method == "ngram":
            speculative = SpeculativeConfig("ngram", prompt_lookup_min=1, adaptive=False)
        else:
            speculative = SpeculativeConfig("draft_model", str(draft or folder), adaptive=False)
        return start(folder, speculative=speculative, **LIMITS | {"cuda_graph_sizes": (2,)} | changes)

    return make


def add_all(driver: Any, names: list[str], generator: torch.Generator, label: str = "") -> None:
    for number, name in enumerate(names):
        prompt = torch.randint(0, 330, (5 + 4 * number,), generator=generator).tolist()
        # What occurred before is looked up.
        driver.add(f"{label} {name}", prompt * 2, max_tokens=7 + 2 * number, **ASKED[name])


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_answers_are_those_without_recordings(
    method: str, guessing: Callable[..., Any], generator: torch.Generator
) -> None:
    state = generator.get_state()
    answers, drafts = [], []
    for changes in ({"enforce_eager": True}, {}):
        generator.set_state(state)
        driver = guessing(method, **changes)
        driver.record_all()
        for label, names in MIXES.items():
            add_all(driver, names, generator, label)
            driver.run()
        answers.append(driver.run())
        drafts.append(driver.metrics.snapshot().drafts)

    assert answers[0] == answers[1]
    assert len(answers[1]) == sum(map(len, MIXES.values()))
    assert drafts[1].num_tokens > 0
    assert (drafts[0].num_tokens, drafts[0].num_accepted) == (drafts[1].num_tokens, drafts[1].num_accepted)
    # All but those in which prompts come, one by one at most.
    num_prompts = len(answers[1])
    assert driver.num_recorded_steps >= driver.num_steps - num_prompts > 0


def test_a_draft_that_is_the_model_is_always_right(
    guessing: Callable[..., Any], generator: torch.Generator
) -> None:
    driver = guessing("draft_model")
    add_all(driver, ["greedy", "drawn"], generator)

    driver.run()

    drafts = driver.metrics.snapshot().drafts
    assert drafts.num_accepted >= 0.9 * drafts.num_tokens > 0


def test_neither_model_runs_on_the_host_once_prompts_are_computed(
    guessing: Callable[..., Any], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = guessing("draft_model")
    add_all(driver, ["greedy", "drawn"], generator)
    driver.step()
    # In which the draft reads the prompts.
    driver.step()
    monkeypatch.setattr(Decoder, "forward", lambda *asked: pytest.fail("a pass kernel by kernel"))

    driver.run()

    assert driver.num_recorded_steps == driver.num_steps - 1


@pytest.mark.parametrize("own_size", [300, 350], ids=["cut", "padded"])
def test_a_draft_of_another_vocabulary_guesses_as_without_recordings(
    own_size: int,
    guessing: Callable[..., Any],
    write_model: Callable[..., Path],
    generator: torch.Generator,
) -> None:
    draft = write_model(vocab_size=own_size)
    state = generator.get_state()
    found = []
    for changes in ({"enforce_eager": True}, {}):
        generator.set_state(state)
        driver = guessing("draft_model", draft, **changes)
        add_all(driver, ["greedy", "drawn"], generator)
        answers = driver.run()
        drafts = driver.metrics.snapshot().drafts
        found.append((answers, drafts.num_tokens, drafts.num_accepted))

    assert found[0] == found[1]


def test_passes_run_ahead_draw_what_single_ones_do(
    guessing: Callable[..., Any], generator: torch.Generator
) -> None:
    """Chunks that want unlike numbers of guesses, one of which has two tokens to compute at first."""
    driver = guessing("draft_model")
    model = driver.engine._runner._speculator._draft_model
    add_all(driver, ["greedy", "drawn"], generator)
    seen: list[Any] = []
    propose = model.propose

    def note(chunks: list[Any]) -> list[tuple[int, ...]]:
        seen.append([replace(one, token_ids=[*one.token_ids]) for one in chunks])
        return [() for _ in chunks]

    model.propose = note
    while not seen or len(seen[-1]) < 2:
        driver.step()
    first, second = seen[-1]
    first, second = replace(first, num_drafts=1), replace(second, num_drafts=GUESSES)
    graphs, model.graphs = model.graphs, None
    with torch.inference_mode():
        want = propose([first, second])
        # The draft's KV of all but the last two tokens is there, or but the last one.
        lacking = replace(first, start=len(first.token_ids) - 2, num_tokens=2, samples=True)
        last = replace(second, start=len(second.token_ids) - 1, num_tokens=1, samples=True)
        got = run_ahead(graphs, [lacking, last], [1, GUESSES])

    assert [len(one) for one in want] == [1, GUESSES]
    assert got == [list(one) for one in want]


def test_what_the_draft_records_is_counted_and_kept_apart(guessing: Callable[..., Any]) -> None:
    driver = guessing("draft_model")
    runner = driver.engine._runner
    draft = runner._speculator.graphs

    assert draft.forms == {StepForm(2), StepForm(4, has_several=True)}
    assert driver.graphs.forms == {StepForm(2), StepForm(6, has_several=True)}
    # Those that end in logits follow; what they leave them in is there already.
    logits = 6 * 330 * 4
    assert driver.metrics.snapshot().cuda_graph_bytes == logits + driver.recorder.used_bytes().pool

"""Steps that are recorded up to their logits: what edits these, draws and tells more of them runs behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5},
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "logprobs": {"temperature": 0.0, "num_logprobs": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.0, "logit_bias": ((3, 5.0),)},
    "allowed": {"seed": 3, "allowed_token_ids": frozenset({3, 4, 5})},
}


def add_all(driver: Any, generator: torch.Generator, asked: dict[str, dict[str, Any]]) -> None:
    for number, (name, sampling) in enumerate(asked.items()):
        prompt = torch.randint(0, 330, (3 + 11 * number,), generator=generator).tolist()
        # Of unlike lengths, so that steps become smaller.
        driver.add(name, prompt, max_tokens=3 + 2 * number, **sampling)


@pytest.fixture
def both(start: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The same engine, recording and not."""

    def make(folder: Path | None = None, **changes: Any) -> tuple[Any, Any]:
        return start(folder, **changes), start(folder, enforce_eager=True, **changes)

    return make


def logprobs_of(driver: Any) -> tuple[list[int], list[float]]:
    """What came with tokens: the likeliest ones, and all log-probabilities."""
    entries = [one for own in driver.outputs.values() for output in own for one in output.logprobs]
    likeliest = [token for one in entries for token, _ in one.top]
    return likeliest, [value for one in entries for value in (one.chosen, *(value for _, value in one.top))]


@pytest.mark.parametrize("name", list(UNUSUAL))
def test_what_is_unusual_is_recorded_up_to_its_logits(
    name: str, both: Callable[..., tuple[Any, Any]], generator: torch.Generator
) -> None:
    recording, plain = both(cuda_graph_sizes=(3,))
    recording.record_all()
    state = generator.get_state()
    for driver in (plain, recording):
        generator.set_state(state)
        add_all(driver, generator, {"greedy": ASKED["greedy"], name: UNUSUAL[name], "drawn": ASKED["drawn"]})

    want, got = plain.run(), recording.run()

    assert got == want
    tokens, values = logprobs_of(recording)
    want_tokens, want_values = logprobs_of(plain)
    assert tokens == want_tokens
    assert values == pytest.approx(want_values, abs=1e-4)
    assert bool(values) == (name == "logprobs")
    # All steps but the first, whose sequences are prompts.
    assert recording.num_recorded_steps == recording.num_replays >= recording.num_steps - 2
    assert plain.num_recorded_steps == 0


def test_what_is_unusual_runs_kernel_by_kernel_until_it_is_recorded(
    both: Callable[..., tuple[Any, Any]], generator: torch.Generator
) -> None:
    recording, plain = both()
    state = generator.get_state()
    for driver in (plain, recording):
        generator.set_state(state)
        add_all(driver, generator, {"greedy": ASKED["greedy"], "bias": UNUSUAL["bias"]})

    assert recording.run() == plain.run()
    # The other request alone, if it lives longer; it does not.
    assert recording.num_replays == recording.num_recorded_steps == 0


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
def test_steps_of_all_kinds_feed_each_other(
    *, overlaps: bool, start: Callable[..., Any], generator: torch.Generator
) -> None:
    """Tokens drawn within a recording, behind one, and without one, are the next step's."""
    limits = {"envelope": Envelope(4, 20), "limits": Limits(4, 20), "cuda_graph_sizes": (2, 4)}
    prompts = [torch.randint(0, 330, (size,), generator=generator).tolist() for size in (5, 3, 50)]
    outputs = []
    for changes in ({"enforce_eager": True}, {"overlap": overlaps}):
        driver = start(**limits, **changes)
        driver.record_all()
        driver.add("plain", prompts[0], max_tokens=14, temperature=0.0)
        for _ in range(3):
            driver.step()
        # Joins for some steps, which then end in logits; its own bias needs no token on the host.
        driver.add("biased", prompts[1], max_tokens=4, seed=3, logit_bias=((5, 2.0),))
        for _ in range(3):
            driver.step()
        driver.add("late", prompts[2], max_tokens=3, seed=4)
        outputs.append(driver.run())

    assert outputs[0] == outputs[1]
    kinds = {form.draws: 0 for form in driver.graphs.forms}
    for form in driver.graphs.forms:
        kinds[form.draws] += driver.graphs._graphs[form].graph.num_replays
    assert min(kinds.values()) >= 2
    assert driver.num_recorded_steps < driver.num_steps - 3

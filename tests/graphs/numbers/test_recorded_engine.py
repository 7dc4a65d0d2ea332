"""An engine whose decode steps are replayed gives the tokens of one that runs them kernel by kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits
from headway_runtime.graphs.forms import StepForm

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5},
    "filtered": {"seed": 6, "temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
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


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"num_hidden_layers": 2}, {}),
    "qwen3 int4, int8 KV": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128},
        {"kv_cache_dtype": "int8", "quantization": "int4"},
    ),
    "mixture": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        {},
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_tokens_are_those_of_plain_steps(
    name: str,
    both: Callable[..., tuple[Any, Any]],
    write_model: Callable[..., Path],
    generator: torch.Generator,
) -> None:
    shape, changes = MODELS[name]
    recording, plain = both(write_model(**shape), **changes)
    state = generator.get_state()
    add_all(plain, generator, ASKED)
    generator.set_state(state)
    add_all(recording, generator, ASKED)

    want, got = plain.run(), recording.run()

    assert got == want
    assert plain.engine._runner.graphs is None
    # All steps but the first, whose sequences are prompts.
    assert recording.num_replays >= 6
    assert recording.metrics.snapshot().counters["steps"] - recording.num_replays <= 2


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
def test_recorded_and_plain_steps_take_turns(
    *, overlaps: bool, start: Callable[..., Any], generator: torch.Generator
) -> None:
    """A prompt is computed beside decodes for some steps, whose samples recorded ones go on from."""
    limits = {"envelope": Envelope(4, 20), "limits": Limits(4, 20), "cuda_graph_sizes": (2, 4)}
    prompts = [torch.randint(0, 330, (size,), generator=generator).tolist() for size in (5, 3, 50)]
    outputs = []
    for changes in ({"enforce_eager": True}, {"overlap": overlaps}):
        driver = start(**limits, **changes)
        driver.add("first", prompts[0], max_tokens=9, temperature=0.0)
        driver.add("second", prompts[1], max_tokens=5, seed=3)
        for _ in range(3):
            driver.step()
        driver.add("late", prompts[2], max_tokens=4, temperature=0.0)
        outputs.append(driver.run())

    assert outputs[0] == outputs[1]
    assert [len(tokens) for tokens in outputs[0].values()] == [9, 5, 4]
    assert 5 <= driver.num_replays <= driver.metrics.snapshot().counters["steps"] - 4


def test_steps_take_the_smallest_size_there_is(start: Callable[..., Any]) -> None:
    driver = start(cuda_graph_sizes=(2, 5))
    assert driver.graphs.forms == {StepForm(2), StepForm(5)}
    largest, small = driver.recorder.works
    for number in range(3):
        driver.add(str(number), [7 + number], max_tokens=2 + 2 * number, temperature=0.0)

    driver.run()

    # Two tokens of three sequences; then two of two, and as many of the last one.
    assert (largest.num_replays, small.num_replays) == (2, 4)


def test_stop_tokens_are_forbidden_for_some_steps_only(
    both: Callable[..., tuple[Any, Any]], generator: torch.Generator
) -> None:
    recording, plain = both()
    stops = frozenset(range(0, 330, 2))
    prompt = torch.randint(0, 330, (9,), generator=generator).tolist()
    for driver in (plain, recording):
        # The same parameters again, when the first one's stop tokens are allowed already.
        for name in ("first", "second"):
            driver.add(name, prompt, max_tokens=6, min_tokens=3, stop_token_ids=stops, seed=4)
            driver.run()

    assert recording.run() == plain.run()
    assert len(recording.run()["first"]) >= 3
    assert recording.num_replays > 0


def test_more_sequences_than_any_size_run_plainly(
    both: Callable[..., tuple[Any, Any]], generator: torch.Generator
) -> None:
    changes = {"cuda_graph_sizes": (2,), "envelope": Envelope(4, 64), "limits": Limits(4, 64)}
    recording, plain = both(**changes)
    state = generator.get_state()
    for driver in (plain, recording):
        generator.set_state(state)
        add_all(driver, generator, ASKED)

    want, got = plain.run(), recording.run()

    assert got == want
    assert 0 < recording.num_replays < recording.metrics.snapshot().counters["steps"] - 1

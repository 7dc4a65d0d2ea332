"""An engine whose decode steps are replayed gives the tokens of one that runs them kernel by kernel."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits
from headway_runtime.graphs.recording import Recorder
from headway_runtime.layers.norm import RMSNorm
from headway_runtime.models.decoder import Decoder

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5},
    "filtered": {"seed": 6, "temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
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


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
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
    """A prompt is computed beside decodes for some steps, whose samples recorded ones go on from, and back."""
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
    assert driver.graphs.sizes == (2, 5)
    largest, small = driver.recorder.works
    for number in range(3):
        driver.add(str(number), [7 + number], max_tokens=2 + 2 * number, temperature=0.0)

    driver.run()

    # Two tokens of three sequences; then two of two, and as many of the last one.
    assert (largest.num_replays, small.num_replays) == (2, 4)


@pytest.mark.parametrize("name", list(UNUSUAL))
def test_what_is_unusual_runs_kernel_by_kernel(
    name: str, both: Callable[..., tuple[Any, Any]], generator: torch.Generator
) -> None:
    recording, plain = both()
    state = generator.get_state()
    for driver in (plain, recording):
        generator.set_state(state)
        add_all(driver, generator, {"greedy": ASKED["greedy"], name: UNUSUAL[name]})

    want, got = plain.run(), recording.run()

    assert got == want
    # The other request alone, if it lives longer; it does not.
    assert recording.num_replays == 0


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


def test_sizes_are_recorded_while_there_is_nothing_else_to_do(start: Callable[..., Any]) -> None:
    driver = start()
    assert driver.graphs.sizes == (1, 6)
    first_bytes = driver.metrics.snapshot().cuda_graph_bytes
    assert first_bytes > 0

    count = 0
    while driver.engine.has_idle_work:
        driver.engine.work_idly()
        count += 1

    assert count == 2
    assert driver.graphs.sizes == (1, 2, 4, 6)
    assert driver.metrics.snapshot().cuda_graph_bytes > first_bytes


def test_recording_between_requests_changes_no_cached_prefix(
    both: Callable[..., tuple[Any, Any]], generator: torch.Generator
) -> None:
    recording, plain = both()
    prompt = torch.randint(0, 330, (20,), generator=generator).tolist()
    for driver in (plain, recording):
        driver.add("first", prompt, max_tokens=3, temperature=0.0)
        driver.run()
    cached = recording.engine._runner._cache.data.clone()

    while recording.engine.has_idle_work:
        recording.engine.work_idly()

    assert torch.equal(recording.engine._runner._cache.data, cached)
    for driver in (plain, recording):
        driver.add("again", prompt, max_tokens=3, temperature=0.0)
    assert recording.run() == plain.run()


class Bounded(Recorder):
    """A device whose recordings take a megabyte each."""

    def used_bytes(self) -> int:
        return len(self.works) << 20


def test_no_more_memory_is_taken_than_was_set_aside(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headway_runtime.kv_budget import KVBudget
    from headway_runtime.runner import Runner

    budget = Runner._budget
    monkeypatch.setattr(Runner, "_budget", lambda *asked: KVBudget(budget(*asked).num_blocks, (2 << 20) + 5))
    driver = start(recorder=Bounded())
    caplog.set_level(logging.INFO)

    while driver.engine.has_idle_work:
        driver.engine.work_idly()

    assert driver.graphs.sizes == (1, 4, 6)
    assert "sizes [2] are left out" in caplog.text
    assert driver.metrics.snapshot().cuda_graph_bytes == 3 << 20


def test_a_wait_for_the_device_is_found_and_steps_run_plainly(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logits = Decoder.logits

    def waiting(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.sum().item() is not None
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", waiting)

    driver = start()
    driver.add("one", [5, 6], max_tokens=4, temperature=0.0)
    got = driver.run()

    assert len(got["one"]) == 4
    assert not driver.engine.has_idle_work
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    (warning,) = (one for one in warnings if "cannot be recorded" in one)
    assert "a decode step of 6 sequences" in warning
    assert "the host waits for the device" in warning
    assert "--enforce-eager" in warning


def test_numbers_of_the_host_in_a_step_are_found(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    norm = RMSNorm.__call__

    def scaled(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return norm(self, x) * torch.tensor([1.0])

    monkeypatch.setattr(RMSNorm, "__call__", scaled)

    driver = start()

    assert driver.graphs.sizes == ()
    assert "lift_fresh" in caplog.text


def test_a_replayed_step_runs_nothing_of_the_model_on_the_host(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    forward = Decoder.forward
    calls: list[int] = []

    def counted(self: Decoder, *asked: Any) -> torch.Tensor:
        calls.append(1)
        return forward(self, *asked)

    monkeypatch.setattr(Decoder, "forward", counted)
    recording = start()
    # Each of two sizes was warmed up and recorded.
    assert len(calls) == 4
    add_all(recording, generator, ASKED)

    recording.run()

    # All three prompts fit one step.
    assert len(calls) == 5


def test_a_number_of_the_host_stays_what_it_was_when_recorded(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder keeps constants as a graph does, or these tests would prove nothing."""
    logits = Decoder.logits
    factor = [1.0]
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: logits(self, hidden).mul_(factor[0]))
    driver = start()
    driver.add("one", [3], max_tokens=4, temperature=0.0)
    want = driver.run()["one"]

    # A step that saw this would take the first of equals, token 0.
    factor[0] = 0.0
    driver.add("two", [3], max_tokens=4, temperature=0.0)

    assert driver.run()["two"] == want
    assert any(want)
    plain = start(enforce_eager=True)
    plain.add("three", [3], max_tokens=4, temperature=0.0)
    assert plain.run()["three"] == [0] * 4


def test_engines_may_be_told_to_record_nothing(start: Callable[..., Any]) -> None:
    driver = start(enforce_eager=True)

    assert driver.engine._runner.graphs is None
    assert not driver.engine.has_idle_work
    assert driver.recorder.works == []
    assert driver.metrics.snapshot().cuda_graph_bytes == 0


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

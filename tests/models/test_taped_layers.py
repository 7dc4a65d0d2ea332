"""Decode steps as tapes: numbers as kernel by kernel, to the last bit, and only where that is sure."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits, SpeculativeConfig
from headway_runtime.kernels.cpu.processor import multiplies_pairs
from headway_runtime.layers.cpu_kernels import noted, rms_norm, tape
from headway_runtime.models import taped_layers

CPU = torch.device("cpu")
# Layers with an operator of PyTorch's between the kernels.
NEVER_TAPED = ("llama, gelu", "moe", "mixtral")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CPU kernels of our own want Linux")
records_steps = pytest.mark.skipif(
    not multiplies_pairs(), reason="on this processor PyTorch's products lie between our kernels"
)


@pytest.fixture
def runs(tape_runs: list[int]) -> list[int]:
    return tape_runs


def answers(driver: Any, prompts: list[list[int]], counts: list[int]) -> list[list[tuple[int, float]]]:
    """Tokens with log-probabilities of requests that begin together and end at different times."""
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        driver.add(str(number), prompt, max_tokens=count, num_logprobs=0)
    driver.run()
    return [
        [
            (token, entry.chosen)
            for one in driver.outputs[str(number)]
            for token, entry in zip(one.token_ids, one.logprobs, strict=True)
        ]
        for number in range(len(prompts))
    ]


@records_steps
def test_answers_are_those_of_kernel_by_kernel(
    any_shape: str,
    checkpoint: Callable[..., Any],
    start_engine: Callable[..., Any],
    random_prompts: Callable[..., list[list[int]]],
    runs: list[int],
) -> None:
    folder = checkpoint(any_shape, "bfloat16").folder
    prompts, counts = random_prompts(5, [3, 40, 17, 90, 1]), [30, 6, 18, 25, 12]
    driver = start_engine(folder)
    taped = answers(driver, prompts, counts)
    num_runs = len(runs)
    plain = answers(start_engine(folder, enforce_eager=True), prompts, counts)
    assert taped == plain
    assert len(runs) == num_runs, "--enforce-eager leaves tapes out"
    if any(word in any_shape for word in NEVER_TAPED):
        assert not runs
    else:
        # 30 steps, of which the first with so many sequences are not.
        assert num_runs >= 15
        assert driver.counter("recorded_steps") > num_runs


@records_steps
@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma3"])
def test_two_threads_meet_after_each_kernel(
    shape: str,
    checkpoint: Callable[..., Any],
    start_engine: Callable[..., Any],
    random_prompts: Callable[..., list[list[int]]],
    runs: list[int],
) -> None:
    folder = checkpoint(shape, "bfloat16").folder
    prompts, counts = random_prompts(7, [3, 40, 17]), [40, 20, 30]
    taped = answers(start_engine(folder, num_threads=2), prompts, counts)
    assert len(runs) >= 20
    assert taped == answers(start_engine(folder, num_threads=2, enforce_eager=True), prompts, counts)


@records_steps
@pytest.mark.parametrize("kept", ["fp8_e4m3", "int8"])
def test_quantized_weights_and_caches_are_taped_too(
    kept: str,
    checkpoint: Callable[..., Any],
    start_engine: Callable[..., Any],
    random_prompts: Callable[..., list[list[int]]],
    runs: list[int],
) -> None:
    folder = checkpoint("llama", "bfloat16").folder
    prompts, counts = random_prompts(6, [3, 40]), [20, 20]
    changes: dict[str, Any] = {"kv_cache_dtype": kept, "quantization": "int8"}
    taped = answers(start_engine(folder, **changes), prompts, counts)
    num_runs = len(runs)
    assert taped == answers(start_engine(folder, enforce_eager=True, **changes), prompts, counts)
    assert num_runs >= 15


@records_steps
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
@pytest.mark.parametrize("guesses", [2, 4])
def test_steps_that_check_guesses_are_taped_too(
    shape: str,
    guesses: int,
    checkpoint: Callable[..., Any],
    start_engine: Callable[..., Any],
    random_prompts: Callable[..., list[list[int]]],
    runs: list[int],
) -> None:
    """A prompt that repeats itself is guessed for, another hardly: both kinds of rows are in most steps."""
    folder = checkpoint(shape, "bfloat16").folder
    (piece, other) = random_prompts(11, [7, 25])
    prompts, counts = [piece * 6, other, piece * 4], [150, 150, 100]
    changes: dict[str, Any] = {
        "speculative": SpeculativeConfig("ngram", prompt_lookup_min=1, adaptive=False),
        "envelope": Envelope(16, 256, guesses),
        "limits": Limits(16, 256, guesses),
    }
    driver = start_engine(folder, **changes)
    taped = answers(driver, prompts, counts)
    num_runs = len(runs)
    assert driver.metrics.snapshot().drafts.num_tokens >= 40
    assert taped == answers(start_engine(folder, enforce_eager=True, **changes), prompts, counts)
    assert taped == answers(start_engine(folder), prompts, counts), "guesses change no number"
    assert num_runs >= 20


def test_what_each_call_leaves_the_next_one_finds() -> None:
    """Hundreds of calls, each on what the one before left, by two threads that take turns."""
    size, num_calls = 256, 300
    norm = rms_norm(size, 1e-6, torch.float32, torch.float32, CPU)
    assert norm is not None
    rows = [torch.empty(64, size) for _ in range(num_calls + 1)]
    deltas = [torch.randn(64, size) for _ in range(num_calls)]
    weight = torch.rand(size) + 0.5

    def compute() -> torch.Tensor:
        for before, after, delta in zip(rows, rows[1:], deltas, strict=False):
            # In place: what the sum leaves in `before` is the next one's.
            normed = norm.add_and_norm(before, delta, weight)
            kept.append(normed)
            norm._norm.run(1, len(normed), normed.data_ptr(), weight.data_ptr(), after.data_ptr())
        return rows[-1]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kept: list[torch.Tensor] = []
        first = torch.randn(64, size)
        rows[0].copy_(first)
        last, calls = noted(compute)
        again = tape(calls, (rows, deltas, weight, kept))
        assert again.num_calls == 2 * num_calls
        want = last.clone()
        for _ in range(20):
            for row in rows:
                row.fill_(torch.nan)
            rows[0].copy_(first)
            again.run()
            assert torch.equal(rows[-1], want)
        other = torch.randn(64, size)
        rows[0].copy_(other)
        again.run()
        assert not torch.equal(rows[-1], want), "what is at the addresses may change"
    finally:
        torch.set_num_threads(threads)


def test_only_the_thread_that_notes_is_noted() -> None:
    from threading import Thread

    norm = rms_norm(64, 1e-6, torch.float32, torch.float32, CPU)
    assert norm is not None
    x, weight = torch.randn(2, 64), torch.ones(64)

    def compute() -> torch.Tensor:
        other = Thread(target=norm.norm, args=(x, weight))
        other.start()
        other.join()
        return norm.norm(x, weight)

    _, calls = noted(compute)
    assert len(calls) == 1
    norm.norm(x, weight)
    assert len(calls) == 1


def test_memory_is_used_again_by_the_turn_after_the_next() -> None:
    memory = taped_layers._Memory()
    like = torch.empty(5, 7, dtype=torch.bfloat16)

    def turn(count: int) -> list[torch.Tensor]:
        memory.turn()
        return [memory.like(like) for _ in range(count)]

    first, second, third = turn(3), turn(3), turn(4)
    addresses = [[one.data_ptr() for one in tensors] for tensors in (first, second, third)]
    assert addresses[2][:3] == addresses[0]
    assert len(set(addresses[0]) | set(addresses[1])) == 6
    assert all(one.shape == like.shape and one.dtype == like.dtype for one in third)
    assert all(address % 64 == 0 for own in addresses for address in own)


def test_memory_grows_without_moving_what_tapes_know() -> None:
    memory = taped_layers._Memory()
    small, large = torch.empty(100), torch.empty(3 * taped_layers.LEAST_CHUNK_BYTES, dtype=torch.uint8)
    memory.turn()
    before = memory.like(small).data_ptr()
    memory.turn()
    memory.turn()
    assert memory.like(small).data_ptr() == before
    memory.like(large).fill_(1)
    memory.turn()
    memory.turn()
    assert memory.like(small).data_ptr() == before


def test_a_layer_with_a_foreign_operator_is_computed_as_ever(
    checkpoint: Callable[..., Any],
    start_engine: Callable[..., Any],
    random_prompts: Callable[..., Any],
    runs: list[int],
) -> None:
    folder = checkpoint("llama, gelu").folder
    driver = start_engine(folder)
    (prompt,) = random_prompts(8, [9])
    driver.add("a", prompt, max_tokens=20)
    driver.run()
    assert driver.tokens("a") == checkpoint("llama, gelu").greedy(prompt, 20)
    assert not runs


def test_another_cache_gets_tapes_of_its_own(
    checkpoint: Callable[..., Any], start_engine: Callable[..., Any], random_prompts: Callable[..., Any]
) -> None:
    """As where memory is measured with a cache that is not the engine's."""
    folder = checkpoint("llama", "bfloat16").folder
    prompts, counts = random_prompts(9, [30, 12]), [12, 12]
    want = answers(start_engine(folder, enforce_eager=True), prompts, counts)
    first, second = start_engine(folder), start_engine(folder)
    answers(first, random_prompts(10, [30, 12]), counts)
    second.engine._runner._model._taped = first.engine._runner._model._taped
    assert answers(second, prompts, counts) == want


SERVED_WITHOUT_PYTORCHS_COMPILER = """
import sys
from headway_runtime import Engine, SamplingParams

with Engine("bundled://headway-tiny", max_model_len=512) as engine:
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, logprobs=1)
    engine.generate(["Once upon a time"] * 3, params, use_tqdm=False)
assert "headway_runtime.kernels.cpu.tape" in sys.modules
assert "torch._dynamo" not in sys.modules, "imported while requests wait: a second, and 100 MB"
"""


@records_steps
def test_a_first_answer_does_not_wait_for_pytorchs_compiler() -> None:
    command = [sys.executable, "-c", SERVED_WITHOUT_PYTORCHS_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

"""Adapters of a model that two ranks share: the answers of one rank, and of PEFT's merged weights."""

from __future__ import annotations

import shutil
from array import array
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.parallel.conftest import load_beside

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import LoraConfig, LoraModule
from headway_runtime.errors import ModelLoadError
from headway_runtime.parallel.step_batch import StepBatch, step_batch
from headway_runtime.request import SamplingParams
from headway_runtime.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headway_runtime.parallel.step_batch import ComputedRows

adapters = load_beside("../adapters/conftest.py", "parallel_adapters")
checkpoint = adapters.checkpoint
NAMES = ("", "one", "two")


def lora(made: Any) -> LoraConfig:
    modules = tuple(LoraModule(name, str(path), str(path)) for name, path in made.adapters.items())
    return LoraConfig(4, 4, 64, modules)


@pytest.mark.parametrize("shape", ["llama", "llama, biases, untied", "qwen3", "gemma2", "mixtral"])
def test_two_ranks_answer_as_alone_with_merged_weights(
    shape: str, checkpoint: Callable[..., Any], pair_driver: Callable[..., Any], random_prompts: Any
) -> None:
    made = checkpoint(shape)
    driver = pair_driver(made.folder, lora=lora(made))
    prompts = random_prompts(3, (5, 19, 33, 40, 70))
    for number, (prompt, name) in enumerate(zip(prompts, cycle(NAMES))):
        add(driver, str(number), prompt, name, 16)
    driver.run()
    for number, (prompt, name) in enumerate(zip(prompts, cycle(NAMES))):
        assert driver.tokens(str(number)) == made.greedy(name, prompt, 16), (number, name)


def test_adapters_come_and_go_on_both_ranks(
    checkpoint: Callable[..., Any], pair_driver: Callable[..., Any], random_prompts: Any, tmp_path: Path
) -> None:
    made = checkpoint("llama")
    driver = pair_driver(made.folder, lora=LoraConfig(1, 1, 64))
    service = driver.engine.adapters
    (prompt,) = random_prompts(5, (30,))
    broken = tmp_path / "broken"
    shutil.copytree(made.adapters["one"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"")
    for name in ("one", "two"):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            service.load_now(LoraModule("broken", str(broken), str(broken)))
        service.load_now(LoraModule("it", name, str(made.adapters[name])))
        add(driver, name, prompt, "it", 12)
        driver.step()
        service.unload("it")
        driver.run()
        assert driver.tokens(name) == made.greedy(name, prompt, 12)
        assert driver.engine.adapter_snapshot().num_bytes == 0


def test_an_adapter_of_other_files_on_another_rank_is_refused_by_name(
    checkpoint: Callable[..., Any], pair_driver: Callable[..., Any], random_prompts: Any, tmp_path: Path
) -> None:
    """Else each rank would add its part of another adapter, and the answers would be nobody's."""
    made = checkpoint("llama")
    driver = pair_driver(made.folder, lora=LoraConfig(1, 1, 64))
    service = driver.engine.adapters
    folder, other = tmp_path / "it", tmp_path / "it.rank1"
    shutil.copytree(made.adapters["one"], folder)
    shutil.copytree(made.adapters["two"], other)
    module = LoraModule("it", str(folder), str(folder))
    with pytest.raises(ModelLoadError) as refused:
        service.load_now(module)
    assert str(refused.value) == (
        f"{folder}: rank 1 on node 0 has other files there than rank 0; copy the same adapter to all nodes"
    )
    assert driver.engine.adapter_snapshot().num_failed == 1
    shutil.rmtree(other)
    shutil.copytree(folder, other)
    service.load_now(module)
    (prompt,) = random_prompts(5, (30,))
    add(driver, "a", prompt, "it", 12)
    driver.run()
    assert driver.tokens("a") == made.greedy("one", prompt, 12)


def test_an_adapter_is_read_once_the_slowest_rank_has_read_it() -> None:
    """Else the step after rank 0's reading would wait for the others'."""
    runner: Any = Runner.__new__(Runner)
    told = iter((0, 0, 1))
    runner.ranks = SimpleNamespace(
        size=2, rank=0, call=lambda call, work: work(), agree=lambda value: min(value, next(told))
    )
    read = iter((False, *(True,) * 6))
    runner._adapters = SimpleNamespace(is_read=lambda slot: next(read))
    assert [runner.is_adapter_read(1) for _ in range(4)] == [False, False, False, True]


def test_a_step_that_was_told_is_taken_apart_a_few_times_not_once_for_each_sequence(
    checkpoint: Callable[..., Any],
    single_driver: Callable[..., Any],
    random_prompts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = checkpoint("llama")
    runner = single_driver(made.folder, lora=lora(made)).engine._runner
    chunks = tuple(
        Chunk(str(index), prompt, 0, 3, array("q", [index + 1]), 0, True, SamplingParams(), adapter=index % 3)
        for index, prompt in enumerate(random_prompts(5, [3] * 12))
    )
    told = step_batch(Batch(chunks, 0, 36), 16)
    taken_apart = vars(StepBatch)["chunks"].fget
    times = []

    def count(batch: StepBatch) -> Sequence[ComputedRows]:
        times.append(batch)
        found: Sequence[ComputedRows] = taken_apart(batch)
        return found

    monkeypatch.setattr(StepBatch, "chunks", property(count))
    _, logits = runner._compute(told)
    assert logits is not None
    assert len(logits) == len(chunks)
    assert len(times) <= 3


def add(driver: Any, request_id: str, prompt: list[int], name: str, num_tokens: int) -> None:
    from headway_runtime.request import Request

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    driver.engine.add_request(Request(request_id, tuple(prompt), sampling, 0.0, adapter=name), 0.0)
    driver.outputs[request_id] = []

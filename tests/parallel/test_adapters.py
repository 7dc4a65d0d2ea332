"""Adapters of a model that two ranks share: the answers of one rank, and of PEFT's merged weights."""

from __future__ import annotations

import shutil
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.parallel.conftest import load_beside

from headway_runtime.config import LoraConfig, LoraModule
from headway_runtime.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def add(driver: Any, request_id: str, prompt: list[int], name: str, num_tokens: int) -> None:
    from headway_runtime.request import Request, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    driver.engine.add_request(Request(request_id, tuple(prompt), sampling, 0.0, adapter=name), 0.0)
    driver.outputs[request_id] = []

"""Adapters of the engine in the user's own process, asked for as in vLLM."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from headway_runtime import Engine, LoRARequest, SamplingParams
from headway_runtime.adapters import loading
from headway_runtime.errors import (
    AdapterNotFoundError,
    AdapterRefusedError,
    InvalidRequestError,
    ModelLoadError,
)
from headway_runtime.kernels.cpu.processor import multiplies_pairs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.adapters.conftest import Checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Once upon a time", "What is 12 + 30?", "one two three"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("bundled://headway-tiny", dtype="float32", enable_lora=True, num_threads=1) as one:
        yield one


def want(bundled: Checkpoint, engine: Engine, name: str, prompt: str) -> tuple[int, ...]:
    return tuple(bundled.greedy(name, engine.tokenizer.encode(prompt, add_special_tokens=True), 12))


def test_a_request_loads_its_adapter_and_each_prompt_has_its_own(engine: Engine, bundled: Checkpoint) -> None:
    one = LoRARequest("one", 1, str(bundled.adapters["one"]))
    two = LoRARequest("two", lora_path=str(bundled.adapters["two"]))
    outputs = engine.generate(PROMPTS, PARAMS, lora_request=[one, None, two], use_tqdm=False)
    for name, prompt, output in zip(("one", "", "two"), PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == want(bundled, engine, name, prompt)
    (again,) = engine.generate(PROMPTS[2], PARAMS, lora_request=LoRARequest("one", 1), use_tqdm=False)
    assert again.outputs[0].token_ids == want(bundled, engine, "one", PROMPTS[2])
    assert engine.list_adapters() == ["one", "two"]


@pytest.mark.skipif(
    not multiplies_pairs(), reason="on this processor PyTorch's products lie between our kernels"
)
def test_decode_steps_with_adapters_are_tapes_too(bundled: Checkpoint, tape_runs: list[int]) -> None:
    one, two = (LoRARequest(name, lora_path=str(bundled.adapters[name])) for name in ("one", "two"))

    def answers(**keywords: Any) -> list[tuple[int, ...]]:
        with Engine("bundled://headway-tiny", dtype="bfloat16", enable_lora=True, **keywords) as engine:
            return [
                output.outputs[0].token_ids
                for requests in ([one, None, two], [one, None, two], [two, one, one], [one, None, one])
                for output in engine.generate(PROMPTS, PARAMS, lora_request=requests, use_tqdm=False)
            ]

    plain = answers(enforce_eager=True)
    assert not tape_runs
    assert answers() == plain
    assert len({*plain}) > 4
    # Of 44 decode steps, the first two of each kind are noted.
    assert len(tape_runs) >= 44 - 2 * 4


async def test_streams_and_chats_have_adapters_too(engine: Engine, bundled: Checkpoint) -> None:
    two = LoRARequest("two", lora_path=str(bundled.adapters["two"]))
    outputs = [one async for one in engine.generate_async(PROMPTS[0], PARAMS, lora_request=two)]
    assert outputs[-1].outputs[0].token_ids == want(bundled, engine, "two", PROMPTS[0])
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    (whole,) = engine.chat(messages, PARAMS, lora_request=two, use_tqdm=False)
    streamed = [one async for one in engine.chat_async(messages, PARAMS, lora_request=two)]
    assert streamed[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_adapters_are_loaded_and_unloaded_by_name(engine: Engine, bundled: Checkpoint) -> None:
    engine.load_adapter("third", str(bundled.adapters["one"]))
    with pytest.raises(AdapterRefusedError, match="'third' has already been loaded"):
        engine.load_adapter("third", str(bundled.adapters["one"]))
    engine.load_adapter("third", str(bundled.adapters["two"]), in_place=True)
    (output,) = engine.generate(PROMPTS[0], PARAMS, lora_request=LoRARequest("third"), use_tqdm=False)
    assert output.outputs[0].token_ids == want(bundled, engine, "two", PROMPTS[0])
    engine.unload_adapter("third")
    with pytest.raises(AdapterNotFoundError, match="'third' cannot be found"):
        engine.unload_adapter("third")
    with pytest.raises(AdapterNotFoundError, match="'third' cannot be found"):
        engine.generate(PROMPTS[0], PARAMS, lora_request=LoRARequest("third"), use_tqdm=False)


def test_an_engine_outlives_an_adapter_that_breaks_its_reading(
    engine: Engine, bundled: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in somebody's files: all others' answers go on."""
    path = tmp_path / "adapter_config.json"
    shutil.copytree(bundled.adapters["one"], tmp_path, dirs_exist_ok=True)
    fields = json.loads(path.read_text())
    for change, named in [
        ({"lora_alpha": 10**400}, "lora_alpha=1000"),
        ({"rank_pattern": {"(?i)Q_PROJ": 4}}, "rank_pattern='(?i)Q_PROJ'"),
    ]:
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ModelLoadError, match=re.escape(f"{path}: {named}")):
            engine.load_adapter("broken", str(tmp_path))
    path.write_text(json.dumps(fields))

    def surprise(*_: object) -> None:
        raise KeyError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "read_adapter", surprise)
        with pytest.raises(ModelLoadError, match=re.escape(f"{tmp_path}: cannot be read (KeyError: ")):
            engine.load_adapter("broken", str(tmp_path))
    engine.load_adapter("mended", str(tmp_path))
    mended = LoRARequest("mended")
    (output,) = engine.generate(PROMPTS[0], PARAMS, lora_request=mended, use_tqdm=False)
    assert output.outputs[0].token_ids == want(bundled, engine, "one", PROMPTS[0])
    engine.unload_adapter("mended")


async def test_requests_of_a_long_backlog_keep_the_adapter_that_they_came_with(bundled: Checkpoint) -> None:
    """Also those that the engine has not yet let into its queue when the adapter is unloaded."""
    one = LoRARequest("one", lora_path=str(bundled.adapters["one"]))
    with Engine(
        "bundled://headway-tiny",
        dtype="float32",
        enable_lora=True,
        num_threads=1,
        max_num_seqs=1,
        max_waiting=1,
        max_loras=1,
        max_cpu_loras=1,
    ) as engine:
        engine.load_adapter("one", one.lora_path)

        async def ask() -> tuple[int, ...]:
            outputs = [part async for part in engine.generate_async(PROMPTS[0], PARAMS, lora_request=one)]
            return outputs[-1].outputs[0].token_ids

        asked = [asyncio.ensure_future(ask()) for _ in range(8)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        engine.unload_adapter("one")
        assert sum(task.done() for task in asked) < len(asked)
        assert {await task for task in asked} == {want(bundled, engine, "one", PROMPTS[0])}
        # The last of them has given its place back.
        engine.load_adapter("two", str(bundled.adapters["two"]))


def test_what_cannot_be_asked_for_is_named(
    engine: Engine, bundled: Checkpoint, checkpoint: Callable[..., Checkpoint]
) -> None:
    path = str(bundled.adapters["one"])
    engine.generate("x", PARAMS, lora_request=LoRARequest("seven", 7, path), use_tqdm=False)
    for request, message in [
        (LoRARequest("eight", 7, path), "lora_int_id=7 is 'seven' already, and not 'eight'"),
        (LoRARequest("seven", 7, path + "/../two"), "'seven' was loaded from"),
        ([None, None], "lora_request has 2 entries for 1 prompts"),
        ("seven", "want LoRARequest"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate("x", PARAMS, lora_request=request, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        engine.load_adapter("foreign", str(checkpoint().adapters["one"]))
    foreign = LoRARequest("foreign", 9, str(checkpoint().adapters["one"]))
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        engine.generate("x", PARAMS, lora_request=foreign, use_tqdm=False)
    # What could not be loaded has not taken the number; what was unloaded gives it back.
    for name in ("eight", "nine"):
        engine.generate("x", PARAMS, lora_request=LoRARequest(name, 9, path), use_tqdm=False)
        engine.unload_adapter(name)
    with Engine("bundled://headway-tiny", num_threads=1) as plain:
        with pytest.raises(AdapterRefusedError, match="make it with enable_lora=True"):
            plain.generate("x", PARAMS, lora_request=LoRARequest("one", 1, path), use_tqdm=False)

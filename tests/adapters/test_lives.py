"""Adapters that come and go while requests run: whose weights each one has, what is shared, what is freed."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headway_runtime.config import Envelope, Limits, LoraModule, OffloadConfig, SpeculativeConfig
from headway_runtime.errors import AdapterNotFoundError, AdapterRefusedError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.adapters.conftest import Checkpoint, StartEngine

    from headway_runtime.adapters.service import LoadOutcome


def test_adapters_share_no_cached_prefixes_with_others_and_do_with_their_own(
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, {**one.adapters, "copy of one": one.adapters["one"]})
    (prompt,) = random_prompts(17, (80,))
    cached = {}
    for request_id, name in [
        ("base", ""),
        ("one", "one"),
        ("two", "two"),
        ("base again", ""),
        ("one again", "one"),
        ("the same under another name", "copy of one"),
        ("two again", "two"),
    ]:
        driver.add(request_id, prompt, name, max_tokens=8)
        driver.run()
        cached[request_id] = driver.outputs[request_id][0].num_cached_tokens
        own = "one" if name == "copy of one" else name
        assert driver.tokens(request_id) == one.greedy(own, prompt, 8), request_id
    assert list(cached.values()) == [0, 0, 0, 64, 64, 64, 64]


def test_other_weights_under_the_same_name_hit_nothing_of_the_old_ones(
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder)
    folder = tmp_path / "adapter"
    (prompt,) = random_prompts(19, (80,))
    for turn, source in enumerate(("one", "two", "one")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(one.adapters[source], folder)
        driver.load("it", folder, in_place=True)
        driver.add(str(turn), prompt, "it", max_tokens=8)
        driver.run()
        assert driver.tokens(str(turn)) == one.greedy(source, prompt, 8)
        # What the first one computed still is what the third one, of equal contents, needs.
        assert driver.outputs[str(turn)][0].num_cached_tokens == (64 if turn == 2 else 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
def test_an_unloaded_adapter_serves_its_requests_to_their_ends_and_no_others(
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
    *,
    overlap: bool,
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, {"it": one.adapters["one"]}, limits=Limits(1, 256), overlap=overlap)
    adapters = driver.engine.adapters
    assert adapters is not None
    prompts = random_prompts(23, (20, 30, 40))
    for number, prompt in enumerate(prompts[:2]):
        driver.add(str(number), prompt, "it", max_tokens=20)
    for _ in range(3):
        driver.step()
    # One runs, the other still waits.
    adapters.unload("it")
    with pytest.raises(AdapterNotFoundError, match="LoRA adapter 'it' cannot be found"):
        driver.add("2", prompts[2], "it")
    assert adapters.entries == []
    assert driver.engine.adapter_snapshot().num_leaving == 1
    # Another one under the same name, meanwhile.
    driver.load("it", one.adapters["two"])
    driver.add("2", prompts[2], "it", max_tokens=20)
    driver.run()
    for number, (prompt, name) in enumerate(zip(prompts, ("one", "one", "two"), strict=True)):
        assert driver.tokens(str(number)) == one.greedy(name, prompt, 20), number
    assert driver.engine.adapter_snapshot().num_leaving == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
@pytest.mark.parametrize("end", ["abort", "finish"])
def test_an_adapters_memory_is_free_when_its_last_request_ends(
    end: str,
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
    *,
    overlap: bool,
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, {"it": one.adapters["one"]}, overlap=overlap)
    adapters, bank = driver.engine.adapters, driver.engine._runner._bank
    assert adapters is not None
    assert bank is not None
    weights: list[Any] = []
    for linear in bank._linears:
        assert linear._kernel is not None
        weights += [
            weakref.ref(one) for delta in linear._kernel._slots.values() for one in (delta.a, *delta.bs)
        ]
    num_bytes = driver.engine.adapter_snapshot().num_bytes
    assert num_bytes == bank.num_bytes(8)
    (prompt,) = random_prompts(29, (20,))
    driver.add("it", prompt, "it", max_tokens=20)
    driver.step()
    adapters.unload("it")
    gc.collect()
    assert all(one() is not None for one in weights)
    assert driver.engine.adapter_snapshot().num_bytes == num_bytes
    assert getattr(driver.engine, end)("it", 0.0)
    driver.engine.check_integrity()
    gc.collect()
    assert not any(one() is not None for one in weights)
    assert driver.engine.adapter_snapshot().num_bytes == 0
    # As it was before, for the next one.
    driver.load("it", one.adapters["two"])
    driver.add("next", prompt, "it", max_tokens=8)
    driver.run()
    assert driver.tokens("next") == one.greedy("two", prompt, 8)


def test_requests_go_on_while_an_adapter_is_loaded(
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, {"one": one.adapters["one"]})
    prompts = random_prompts(31, (20, 30))
    driver.add("before", prompts[0], "one", max_tokens=100)
    driver.step()
    driver.load("two", one.adapters["two"])
    assert driver.outputs["before"][-1].finish_reason is None
    driver.add("after", prompts[1], "two", max_tokens=20)
    driver.run()
    assert driver.tokens("before") == one.greedy("one", prompts[0], 100)
    assert driver.tokens("after") == one.greedy("two", prompts[1], 20)


def test_there_are_no_more_adapters_than_the_flag_says(
    checkpoint: Callable[..., Checkpoint], start_engine: StartEngine
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, one.adapters, lora={"max_loras": 2, "max_cpu_loras": 2})
    adapters = driver.engine.adapters
    assert adapters is not None
    with pytest.raises(
        AdapterRefusedError, match="no room: --max-cpu-loras=2 adapters are loaded; unload one"
    ):
        driver.load("three", one.adapters["one"])
    with pytest.raises(AdapterRefusedError, match="'one' has already been loaded"):
        driver.load("one", one.adapters["one"])
    adapters.unload("one")
    driver.load("three", one.adapters["one"])
    assert [one.name for one in adapters.entries] == ["two", "three"]


def test_a_load_that_fails_leaves_its_place(
    checkpoint: Callable[..., Checkpoint], start_engine: StartEngine, tmp_path: Path
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, {}, lora={"max_loras": 1, "max_cpu_loras": 1})
    adapters = driver.engine.adapters
    assert adapters is not None
    adapters.begin(LoraModule("bad", "bad", str(tmp_path)), token="bad")
    outcomes = []
    while adapters.is_loading:
        outcomes += adapters.poll()
    assert [(one.token, "adapter_config.json" in str(one.error)) for one in outcomes] == [("bad", True)]
    assert [one.name for one in adapters.entries] == []
    assert driver.engine.adapter_snapshot().num_failed == 1
    driver.engine.check_integrity()
    driver.load("good", one.adapters["one"])


def test_an_engine_without_adapters_knows_no_adapter(
    checkpoint: Callable[..., Checkpoint], start_engine: StartEngine
) -> None:
    driver = start_engine(checkpoint().folder, lora=None)
    with pytest.raises(AdapterNotFoundError, match="'nobody' cannot be found"):
        driver.add("it", [1, 2, 3], "nobody")
    assert driver.metrics.snapshot().rejected["model_not_found"] == 1


def test_an_adapter_that_does_not_fit_keeps_the_engine_from_starting(
    checkpoint: Callable[..., Checkpoint], start_engine: StartEngine
) -> None:
    one, other = checkpoint(), checkpoint("qwen3")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        start_engine(one.folder, {"foreign": other.adapters["one"]})


def test_an_engine_that_does_not_start_because_of_an_adapter_leaves_no_thread_behind(
    checkpoint: Callable[..., Checkpoint], start_engine: StartEngine, tmp_path: Path
) -> None:
    one, other = checkpoint(), checkpoint("qwen3")
    before = set(threading.enumerate())
    offload = OffloadConfig(2**20, str(tmp_path), 2**20)
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        start_engine(one.folder, {"foreign": other.adapters["one"]}, offload=offload)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"headway-kv-read", "headway-kv-write"}


def test_want_of_memory_for_an_adapter_is_told_and_ends_nothing(
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, {"one": one.adapters["one"]})
    adapters, bank = driver.engine.adapters, driver.engine._runner._bank
    assert adapters is not None
    (prompt,) = random_prompts(37, (20,))
    driver.add("before", prompt, "one", max_tokens=20)
    driver.step()

    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(bank, "made", full)
        adapters.begin(LoraModule("two", "two", str(one.adapters["two"])), token="it")
        outcomes: list[LoadOutcome] = []
        while not outcomes:
            driver.engine.step(time.monotonic())
            outcomes = adapters.poll()
    assert "cannot be taken into memory (RuntimeError: out of memory); unload" in (outcomes[0].error or "")
    driver.load("two", one.adapters["two"])
    driver.add("after", prompt, "two", max_tokens=8)
    driver.run()
    assert driver.tokens("after") == one.greedy("two", prompt, 8)


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_offload_keeps_adapters_prefixes_apart_and_guesses_change_nothing(
    method: Any,
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    """The KV cache has room for three prompts, host memory for all; engines share a disk."""
    one = checkpoint()
    block_bytes = 2 * 3 * 2 * 16 * 4 * 16
    changes: dict[str, Any] = {
        "max_model_len": 128,
        "offload": OffloadConfig(100 * block_bytes, str(tmp_path), 2**30),
    }
    num_cached_blocks = 18
    if method is not None:
        draft = str(one.folder) if method == "draft_model" else None
        changes["speculative"] = SpeculativeConfig(method, draft, 1, 3, adaptive=False)
        changes |= {"limits": Limits(16, 256, 3), "envelope": Envelope(16, 256, 3)}
        # A draft has KV of its own in the same blocks.
        num_cached_blocks *= 2 if method == "draft_model" else 1
    memory_bytes = block_bytes * (num_cached_blocks + (2 if method == "draft_model" else 1))
    prompts = random_prompts(41, (80, 80))
    jobs = [(prompt, name) for prompt in prompts for name in ("", "one", "two")]
    for turn in range(2):
        driver = start_engine(one.folder, one.adapters, kv_cache_memory_bytes=memory_bytes, **changes)
        for again in range(2):
            for number, (prompt, name) in enumerate(jobs):
                request_id = f"{again} {number}"
                driver.add(request_id, prompt, name, max_tokens=12)
                driver.run()
                assert driver.tokens(request_id) == one.greedy(name, prompt, 12), (turn, request_id)
                if again:
                    assert driver.outputs[request_id][0].num_cached_tokens == 64
        assert driver.metrics.snapshot().offload.host.hit_tokens > 0
        if method == "draft_model":
            assert driver.metrics.snapshot().drafts.num_accepted > 0
        driver.engine.close()

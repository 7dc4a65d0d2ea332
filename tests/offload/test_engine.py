"""Engines that offload give the answers of engines that do not, and find what they would have lost."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headway_runtime.config import Envelope, Limits, OffloadConfig, SpeculativeConfig
from headway_runtime.errors import ConfigError
from headway_runtime.offload import tiers

if TYPE_CHECKING:
    from tests.offload.conftest import Driver

StartEngine = Callable[..., "Driver"]
RandomPrompts = Callable[..., list[list[int]]]
BLOCK_SIZE = 16


WAIT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models compute as fast as a busy machine reads: nobody is to know, and a disk gets its time."""
    monkeypatch.setattr(tiers, "LEAST_TELLING_TOKENS", 10**9)
    monkeypatch.setattr(tiers, "UNKNOWN_WAIT_SECONDS", WAIT_SECONDS)


def answers(driver: "Driver", prompts: list[list[int]]) -> list[list[int]]:
    return [driver.ask(prompt)[0] for prompt in prompts]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_a_prefix_that_left_the_kv_cache_is_found_in_host_memory(
    kv_dtype: str, start_engine: StartEngine, random_prompts: RandomPrompts
) -> None:
    prompts = random_prompts(1, [200] * 5)
    # All types get as many blocks as float32 has; those of one byte take less, so say how many.
    per_block = BLOCK_SIZE * 3 * 4 * (16 * 4 if kv_dtype == "auto" else 16 + 4)
    changes = {"kv_cache_dtype": kv_dtype, "kv_cache_memory_bytes": per_block * 21}
    want = answers(start_engine(0, enable_prefix_caching=False, **changes), prompts)
    driver = start_engine(80, **changes)
    assert answers(driver, prompts) == want
    assert driver.offload.transfers["device_to_host"].num_blocks >= 40
    for prompt, answer in zip(prompts, want, strict=True):
        assert driver.ask(prompt) == (answer, 192), "all full blocks but what is left to be computed"
    found = driver.offload
    assert found.host.hit_tokens >= 4 * 192
    assert found.transfers["host_to_device"].num_blocks == found.host.hit_tokens // BLOCK_SIZE
    assert found.transfers["host_to_device"].num_bytes == found.host.hit_tokens // BLOCK_SIZE * per_block
    counters = driver.metrics.snapshot().counters
    assert counters["cached_tokens"] == 5 * 192
    assert counters["prompt_tokens"] == 5 * 200 + 5 * 8


def test_without_offload_it_is_lost(start_engine: StartEngine, random_prompts: RandomPrompts) -> None:
    prompts = random_prompts(1, [200] * 5)
    driver = start_engine(0)
    answers(driver, prompts)
    assert driver.ask(prompts[0])[1] == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
def test_what_was_loaded_is_shared_like_what_was_computed(
    start_engine: StartEngine, random_prompts: RandomPrompts, *, overlap: bool
) -> None:
    first, *others = random_prompts(2, [160] * 4)
    driver = start_engine(80, overlap=overlap)
    answer = driver.ask(first)[0]
    answers(driver, others)
    names = [driver.add(first) for _ in range(3)]
    driver.run()
    assert [driver.tokens(name) for name in names] == [answer] * 3
    assert driver.offload.transfers["host_to_device"].num_blocks == 9, "each block once"
    assert driver.offload.host.hit_tokens == 144
    assert driver.metrics.snapshot().counters["cached_tokens"] == 3 * 144


def test_tenants_do_not_find_each_others_blocks(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    first, *others = random_prompts(3, [200] * 4)
    driver = start_engine(80, tmp_path)
    driver.ask(first, salt="a")
    answers(driver, others)
    assert driver.ask(first, salt="b")[1] == 0
    answers(driver, others)
    assert driver.ask(first, salt="a")[1] == 192


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
def test_preempted_sequences_find_their_blocks_again(
    start_engine: StartEngine, random_prompts: RandomPrompts, *, overlap: bool
) -> None:
    prompts = random_prompts(4, [60] * 6)
    want = [start_engine(0).ask(prompt, max_tokens=80)[0] for prompt in prompts]
    driver = start_engine(100, overlap=overlap)
    names = [driver.add(prompt, max_tokens=80) for prompt in prompts]
    driver.run()
    assert driver.metrics.snapshot().counters["preemptions"] >= 2
    assert [driver.tokens(name) for name in names] == want
    assert driver.offload.transfers["host_to_device"].num_blocks >= 4
    assert driver.offload.host.hit_tokens == 0, "what is found after a preemption is no hit"


def test_host_memory_smaller_than_a_prompt_is_of_some_use_and_no_harm(
    start_engine: StartEngine, random_prompts: RandomPrompts
) -> None:
    prompts = random_prompts(5, [200] * 4)
    want = answers(start_engine(0, enable_prefix_caching=False), prompts)
    driver = start_engine(3)
    for _ in range(3):
        assert answers(driver, prompts) == want
    assert driver.offload.host.held_blocks == 3
    assert driver.offload.host.evicted_blocks > 20


def test_a_restarted_engine_finds_on_the_disk_what_the_last_one_left(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(6, [200] * 4)
    driver = start_engine(80, tmp_path)
    want = answers(driver, prompts)
    assert answers(driver, prompts[:2]) == want[:2], "which drives the others out"
    driver.engine.close()
    again = start_engine(80, tmp_path)
    again.flush()
    assert [again.ask(prompt) for prompt in prompts] == [(answer, 192) for answer in want]
    found = again.offload
    assert found.disk.hit_tokens == 4 * 192
    assert found.host.hit_tokens == 0
    # Blocks that have been used once since they came from the disk are host memory's.
    assert again.ask(prompts[0])[1] == 192
    assert again.offload.host.hit_tokens == 192


def test_what_host_memory_gave_up_comes_from_the_disk(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(7, [200] * 6)
    want = answers(start_engine(0), prompts)
    driver = start_engine(30, tmp_path)
    for _ in range(2):
        for prompt, answer in zip(prompts, want, strict=True):
            assert driver.ask(prompt)[0] == answer
            driver.flush()
    assert driver.offload.disk.hit_tokens >= 4 * 192
    assert driver.offload.unwritten_blocks == 0


@pytest.mark.parametrize(
    "change", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"dtype": "bfloat16"}]
)
def test_an_engine_of_another_type_does_not_read_what_this_one_wrote(
    change: dict[str, str], start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(8, [200] * 3)
    driver = start_engine(80, tmp_path)
    answers(driver, prompts)
    driver.engine.close()
    other = start_engine(80, tmp_path, **change)
    other.flush()
    assert other.ask(prompts[0])[1] == 0


def test_an_engine_of_other_weights_does_not_read_what_this_one_wrote(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path, other_model_folder: Path
) -> None:
    prompts = random_prompts(8, [200] * 3)
    want = start_engine(0, model_path=str(other_model_folder)).ask(prompts[0])
    driver = start_engine(80, tmp_path)
    assert driver.ask(prompts[0]) != want
    answers(driver, prompts)
    driver.engine.close()
    other = start_engine(80, tmp_path, model_path=str(other_model_folder))
    other.flush()
    assert other.ask(prompts[0]) == want


def test_keys_that_were_rotated_for_another_length_are_not_read(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path, dynamic_folder: Path
) -> None:
    prompts = random_prompts(8, [200] * 3)
    model = {"model_path": str(dynamic_folder)}
    want = start_engine(0, **model).ask(prompts[0])
    driver = start_engine(80, tmp_path, max_model_len=220, **model)
    own = answers(driver, prompts)
    driver.engine.close()
    longer, same = (start_engine(80, tmp_path, max_model_len=length, **model) for length in (256, 220))
    longer.flush()
    assert longer.ask(prompts[0]) == want
    same.flush()
    assert same.ask(prompts[0]) == (own[0], 192)


def test_damaged_files_change_no_answer(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(9, [200] * 4)
    driver = start_engine(80, tmp_path)
    want = answers(driver, prompts)
    driver.engine.close()
    paths = sorted(tmp_path.rglob("*.kv"))
    for path in paths[::2]:
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 255
        path.write_bytes(whole)
    for path in paths[1::4]:
        path.write_bytes(path.read_bytes()[:1000])
    again = start_engine(80, tmp_path)
    again.flush()
    assert answers(again, prompts) == want
    assert again.offload.corrupt_blocks >= 1
    assert again.offload.disk.hit_tokens < 4 * 192


def test_a_reset_forgets_host_memory_and_disk(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(10, [200] * 4)
    driver = start_engine(80, tmp_path)
    want = answers(driver, prompts)
    driver.flush()
    assert list(tmp_path.rglob("*.kv"))
    driver.engine.reset_prefix_cache()
    driver.flush()
    assert not list(tmp_path.rglob("*.kv"))
    assert driver.offload.host.held_blocks == 0
    assert [driver.ask(prompt) for prompt in prompts] == [(answer, 0) for answer in want]


def test_one_that_waits_for_the_disk_holds_nobody_up_and_waits_no_longer_than_it_may(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(11, [200] * 4)
    driver = start_engine(80, tmp_path)
    want = answers(driver, prompts)
    driver.engine.close()
    again = start_engine(80, tmp_path)
    again.flush()
    may_read = threading.Event()
    monkeypatch.setattr(again.engine._runner.host_blocks, "settle", lambda: may_read.wait(30))
    slow = again.add(prompts[0])
    again.step()
    (waiting,) = again.engine._scheduler._queue
    assert waiting.awaits_until is not None
    assert waiting.awaits_until <= time.monotonic() + WAIT_SECONDS
    waiting.awaits_until = float("inf")
    quick = again.add(prompts[1][:10])
    while not again.outputs[quick] or again.outputs[quick][-1].finish_reason is None:
        again.step()
    assert not again.outputs[slow], "it waits, and is overtaken"
    waiting.awaits_until = time.monotonic()
    again.run()
    assert again.outputs[slow][0].num_cached_tokens == 0, "computed after all"
    assert again.tokens(slow) == want[0]
    may_read.set()
    again.flush()
    assert again.ask(prompts[1]) == (want[1], 192), "the next one is read"


def test_a_disk_slower_than_computing_is_not_read(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(12, [200] * 4)
    driver = start_engine(80, tmp_path)
    want = answers(driver, prompts)
    driver.engine.close()
    again = start_engine(80, tmp_path)
    again.flush()
    offload = again.engine._offload
    assert offload is not None
    offload.observe_step(10**9, 10**6)
    again.disk._seconds_per_read = 1.0
    assert again.ask(prompts[0]) == (want[0], 0)
    assert again.offload.unread_blocks == 12
    again.disk.forget_slowness(0.0)  # as it comes to by and by
    assert again.ask(prompts[1]) == (want[1], 192)


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_guesses_go_on_over_what_was_loaded(
    method: str, start_engine: StartEngine, random_prompts: RandomPrompts, draft_folder: Path
) -> None:
    prompts = random_prompts(13, [180] * 4)
    want = [start_engine(0).ask(prompt, max_tokens=40)[0] for prompt in prompts]
    draft = str(draft_folder) if method == "draft_model" else None
    speculative = SpeculativeConfig(method, draft, adaptive=False)  # type: ignore[arg-type]
    limits = {"limits": Limits(8, 256, 3), "envelope": Envelope(8, 256, 3)}
    driver = start_engine(80, num_blocks=24, speculative=speculative, **limits)
    for _ in range(2):
        assert [driver.ask(prompt, max_tokens=40)[0] for prompt in prompts] == want
    assert driver.offload.host.hit_tokens >= 3 * 176
    assert driver.metrics.snapshot().drafts.num_tokens > 0


def test_a_model_with_windows_says_what_is_not_kept_and_answers_the_same(
    start_engine: StartEngine,
    random_prompts: RandomPrompts,
    window_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [*random_prompts(16, [200] * 3), *random_prompts(17, [60] * 6)]
    want = answers(start_engine(0, model_path=str(window_folder)), prompts)
    with caplog.at_level(logging.WARNING):
        driver = start_engine(80, model_path=str(window_folder))
    assert "least window, 64 tokens" in caplog.text
    for _ in range(2):
        assert answers(driver, prompts) == want
    assert driver.offload.host.hit_tokens >= 48, "of prompts within the window"


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
def test_a_step_that_fails_leaves_no_wrong_contents_behind(
    start_engine: StartEngine,
    random_prompts: RandomPrompts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    overlap: bool,
) -> None:
    prompts = random_prompts(14, [200] * 3)
    driver = start_engine(80, overlap=overlap)
    want = answers(driver, prompts)
    runner = driver.engine._runner

    def fails(*_: object) -> tuple[float, float]:
        raise RuntimeError("no copy today")

    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr(runner, "copy_blocks", fails)
        name = driver.add(prompts[0])
        driver.run()
        assert "no copy today" in (driver.outputs[name][-1].error or "")
    for _ in range(2):
        assert answers(driver, prompts) == want


def test_more_than_there_is_or_less_than_a_block_is_refused(start_engine: StartEngine) -> None:
    with pytest.raises(ConfigError, match=r"--kv-offloading-size=.* main memory that are free"):
        start_engine(10**12)
    with pytest.raises(ConfigError, match=r"--kv-offloading-size=.* hold no block, which takes 12288"):
        start_engine(0, offload=OffloadConfig(1000))


def test_the_folder_holds_no_text_and_no_salt(
    start_engine: StartEngine, random_prompts: RandomPrompts, tmp_path: Path
) -> None:
    prompts = random_prompts(15, [200] * 3)
    driver = start_engine(80, tmp_path)
    for prompt in prompts:
        driver.ask(prompt, salt="a-secret-salt")
    driver.flush()
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) > 10
    assert not any("secret" in str(path) or b"a-secret-salt" in path.read_bytes() for path in paths)
    assert set(json.loads((tmp_path / "weights.json").read_text())) != set()

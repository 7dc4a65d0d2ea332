"""Offload as a client and a scraper see it: cached tokens, metrics, a restart."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from headway_runtime.memory import kv_bytes_per_token
from headway_runtime.model_config import read_model_config

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

BLOCK_SIZE = 16
NUM_BLOCKS = 20


def cached_tokens(server: RunningServer, prompt: list[int]) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def offload_numbers(server: RunningServer) -> dict[tuple[str, str], float]:
    """(name without its prefix, value of its only label) -> number."""
    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    return {
        (sample.name.removeprefix("headway_kv_offload_"), next(iter(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("headway_kv_offload_")
    }


def numbers_until(server: RunningServer, accept: Callable[[dict[tuple[str, str], float]], bool]) -> None:
    """Returns once the page says what `accept` likes."""
    deadline = time.monotonic() + 30
    while not accept(found := offload_numbers(server)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_evicted_prefixes_are_cached_tokens_and_outlive_the_server(
    start_server: StartServer, model_folder: Path, tmp_path: Path
) -> None:
    model = read_model_config(model_folder)
    folder = tmp_path / "kv"
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(model, model.dtype)
    flags = [
        "--num-threads=1",
        "--max-model-len=256",
        f"--kv-cache-memory-bytes={block_bytes * (NUM_BLOCKS + 1)}",
        "--kv-offloading-size=0.0625",
        f"--kv-offloading-disk-path={folder}",
        "--kv-offloading-disk-size=0.125",
    ]
    draw = random.Random(1)
    prompts = [[draw.randrange(3, model.vocab_size) for _ in range(200)] for _ in range(4)]
    server = start_server(*flags, fake=False)
    assert [cached_tokens(server, prompt) for prompt in prompts] == [0, 0, 0, 0]
    assert [cached_tokens(server, prompt) for prompt in prompts] == [192, 192, 192, 192]
    found = offload_numbers(server)
    assert found["hit_tokens_total", "host"] >= 2 * 192
    assert (
        found["bytes_total", "host_to_device"] == block_bytes * found["hit_tokens_total", "host"] / BLOCK_SIZE
    )
    assert found["held_bytes", "host"] == block_bytes * found["held_blocks", "host"] > 0
    assert found["limit_bytes", "disk"] == 2**27
    assert found["seconds_total", "device_to_host"] > 0
    numbers_until(server, lambda found: found["copied_blocks_total", "host_to_disk"] >= 24)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert list(folder.rglob("*.kv"))
    again = start_server(*flags, fake=False)
    numbers_until(again, lambda found: found["held_blocks", "disk"] >= 24)
    # Of the others, a model as small as this may be sooner done with computing.
    assert cached_tokens(again, prompts[0]) == 192
    assert offload_numbers(again)["hit_tokens_total", "disk"] == 192
    assert httpx.post(f"{again.url}/reset_prefix_cache", timeout=30, headers=admin(again)).status_code == 200
    assert [cached_tokens(again, prompt) for prompt in prompts] == [0, 0, 0, 0]


def admin(server: RunningServer) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.admin_token()}"}

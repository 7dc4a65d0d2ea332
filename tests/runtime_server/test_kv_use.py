"""A server whose KV cache is full of real requests says on its own page how much of it holds tokens."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.runtime_server.conftest import StartServer

CONFIGURED_BYTES = 2 * 2**20
# Keys and values, 2 layers, 2 KV heads of 16, float32: see `model_folder`.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
BLOCK = 16


def gauges(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return {family.name: family.samples[0].value for family in families if family.samples}


def test_a_full_cache_holds_tokens_in_95_percent_of_its_configured_memory(start_server: StartServer) -> None:
    server = start_server(
        f"--kv-cache-memory-bytes={CONFIGURED_BYTES}",
        f"--block-size={BLOCK}",
        "--max-num-seqs=16",
        "--num-threads=1",
        fake=False,
    )
    slots_paid_for = CONFIGURED_BYTES / BYTES_PER_TOKEN
    total = gauges(server.url)["headway_kv_blocks_total"]
    assert total * BLOCK >= 0.95 * slots_paid_for

    def ask(number: int) -> int:
        prompt = [10 + (number * 37 + position * 11) % 380 for position in range(60 + number)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.is_success, answer.text
        return int(answer.json()["usage"]["completion_tokens"])

    fullest = 0.0
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(ask, number) for number in range(32)]
        while not all(one.done() for one in asked):
            page = gauges(server.url)
            assert page["headway_kv_blocks_used"] <= page["headway_kv_blocks_total"] == total
            # Every sequence that runs wastes the rest of one block, or of a prompt that is under way.
            share = page["headway_kv_blocks_used"] / total - page["headway_kv_wasted_ratio"]
            fullest = max(fullest, share * total * BLOCK / slots_paid_for)
        assert [one.result() for one in asked] == [400] * 32
    assert fullest >= 0.95, fullest
    page = gauges(server.url)
    assert page["headway_kv_blocks_used"] == page["headway_kv_wasted_ratio"] == 0

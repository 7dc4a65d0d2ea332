"""A server whose KV cache is full of real requests says on its own page how much of it holds tokens."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.runtime_server.conftest import StartServer

NUM_TOKENS = 4096
# Of a token: keys and values, 2 layers, 2 KV heads of 16 numbers of 4 bytes, or of 1 and a scale; see
# `model_folder`.
BYTES_PER_TOKEN = {"float32": 2 * 2 * 2 * 16 * 4, "int8": 2 * 2 * 2 * (16 + 4)}
BLOCK = 16
MAX_ROUNDS = 6


def gauges(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return {family.name: family.samples[0].value for family in families if family.samples}


def runtime_labels(url: str) -> dict[str, str]:
    """What the server's info metric says is in force."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    (info,) = (one for family in families for one in family.samples if one.name == "headway_runtime_info")
    return dict(info.labels)


@pytest.mark.parametrize(("asked_for", "kv_dtype"), [("auto", "float32"), ("int8", "int8")])
def test_a_full_cache_holds_tokens_in_95_percent_of_its_configured_memory(
    asked_for: str, kv_dtype: str, start_server: StartServer
) -> None:
    server = start_server(
        f"--kv-cache-memory-bytes={NUM_TOKENS * BYTES_PER_TOKEN[kv_dtype]}",
        f"--kv-cache-dtype={asked_for}",
        f"--block-size={BLOCK}",
        "--max-num-seqs=16",
        "--num-threads=1",
        fake=False,
    )
    assert runtime_labels(server.url)["kv_dtype"] == kv_dtype
    assert runtime_labels(server.url)["weight_compression"] == "none"  # of float32
    slots_paid_for = NUM_TOKENS
    total = gauges(server.url)["headway_kv_blocks_total"]
    assert total * BLOCK >= 0.95 * slots_paid_for

    def ask(number: int) -> int:
        prompt = [10 + (number * 37 + position * 11) % 380 for position in range(60 + number)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.is_success, answer.text
        return int(answer.json()["usage"]["completion_tokens"])

    fullest = 0.0
    # The page is read between steps of the server, so a short peak can pass unseen: then the users ask again.
    for _ in range(MAX_ROUNDS):
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            asked = [pool.submit(ask, number) for number in range(32)]
            while not all(one.done() for one in asked):
                page = gauges(server.url)
                assert page["headway_kv_blocks_used"] <= page["headway_kv_blocks_total"] == total
                # Every sequence that runs wastes the rest of one block, or of a prompt that is under way.
                share = page["headway_kv_blocks_used"] / total - page["headway_kv_wasted_ratio"]
                fullest = max(fullest, share * total * BLOCK / slots_paid_for)
            assert [one.result() for one in asked] == [400] * 32
        if fullest >= 0.95:
            break
    assert fullest >= 0.95, fullest
    page = gauges(server.url)
    assert page["headway_kv_blocks_used"] == page["headway_kv_wasted_ratio"] == 0

"""The Prometheus page parses, and says what the engine counted."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from headway_runtime.histograms import EDGES_MILLISECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric
    from tests.runtime_server.conftest import RunningServer

HISTOGRAMS = {
    "headway_time_to_first_token_seconds",
    "headway_queue_time_seconds",
    "headway_prefill_time_seconds",
    "headway_delivery_time_seconds",
    "headway_first_decode_time_seconds",
    "headway_time_per_output_token_seconds",
    "headway_inter_token_latency_seconds",
    "headway_end_to_end_seconds",
    "headway_step_time_seconds",
}
SIZE_HISTOGRAMS = {
    "headway_batch_tokens",
    "headway_batch_sequences",
    "headway_request_prompt_tokens",
    "headway_request_generated_tokens",
}


def values(families: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_page_says_what_the_requests_did(real_server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}

    def page() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        response = httpx.get(f"{real_server.url}/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        return values(text_string_to_metric_families(response.text))

    before = page()
    for _ in range(2):
        assert httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=30).is_success
    after = page()

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before[key]

    assert grown("headway_requests_received_total") == 2
    assert grown("headway_requests_finished_total", outcome="length") == 2
    assert grown("headway_tokens_total", kind="generated") == 10
    assert grown("headway_time_to_first_token_seconds_count") == 2
    assert grown("headway_queue_time_seconds_count") == 2
    assert grown("headway_prefill_time_seconds_count") == 2
    assert grown("headway_time_per_output_token_seconds_count") == 2
    assert grown("headway_inter_token_latency_seconds_count") == 8
    assert grown("headway_end_to_end_seconds_count") == 2
    # What a first token's time is made of adds up to it, but for the rounding of the three.
    parts = ("headway_queue_time", "headway_prefill_time", "headway_delivery_time")
    assert sum(grown(f"{part}_seconds_sum") for part in parts) == pytest.approx(
        grown("headway_time_to_first_token_seconds_sum"), abs=1e-3
    )
    assert 0 < grown("headway_end_to_end_seconds_sum") < 60
    assert grown("headway_step_time_seconds_count") >= 5
    assert grown("headway_first_decode_time_seconds_count") == 2
    assert grown("headway_delivery_time_seconds_count") == 2
    assert grown("headway_request_prompt_tokens_count") == 2
    assert grown("headway_request_generated_tokens_sum") == 10
    steps = grown("headway_step_time_seconds_count")
    assert grown("headway_batch_sequences_count") == grown("headway_batch_tokens_count") == steps
    # Two requests one after the other: each step held one sequence.
    assert grown("headway_batch_sequences_sum") == steps
    computed = grown("headway_step_tokens_total", kind="prefill")
    assert grown("headway_batch_tokens_sum") == computed + grown("headway_step_tokens_total", kind="decode")
    assert 0 < after["headway_model_load_seconds", ()] < 60
    assert after["headway_limit", (("limit", "max_num_seqs"),)] == 8
    assert after["headway_kv_blocks_used", ()] == 0
    assert after["headway_kv_wasted_ratio", ()] == 0
    # Neither request filled a block.
    assert grown("headway_kv_blocks_cached") == 0
    assert after["headway_kv_blocks_total", ()] > 0


def test_a_prompt_that_came_before_is_a_hit_by_tokens(real_server: RunningServer) -> None:
    prompt = [7, 5, 6, 8] * 20 + [9]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    pages = []
    for _ in range(2):
        assert httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=30).is_success
        pages.append(values(text_string_to_metric_families(httpx.get(f"{real_server.url}/metrics").text)))
    first, second = pages

    def grown(name: str) -> float:
        return second[name, ()] - first[name, ()]

    assert grown("headway_prefix_cache_queries_total") == len(prompt)
    assert grown("headway_prefix_cache_hits_total") == 80, "all full blocks of 16"
    computed = ("headway_tokens_total", (("kind", "prompt"),))
    assert second[computed] - first[computed] == len(prompt) - 80
    assert second["headway_kv_blocks_cached", ()] >= 5


def test_buckets_are_seconds_cumulative_and_at_most_15_percent_apart(real_server: RunningServer) -> None:
    families = text_string_to_metric_families(httpx.get(f"{real_server.url}/metrics").text)
    histograms = {family.name: family for family in families if family.type == "histogram"}
    assert set(histograms) == HISTOGRAMS | SIZE_HISTOGRAMS
    for name in HISTOGRAMS:
        family = histograms[name]
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        edges = [float(sample.labels["le"]) for sample in buckets]
        assert len(edges) == len(EDGES_MILLISECONDS) + 1
        assert edges[0] == 0.001
        assert edges[-1] == float("inf")
        assert all(low < high <= low * 1.15 for low, high in pairwise(edges[:-1]))
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)


def test_openmetrics_is_spoken_when_asked_for(real_server: RunningServer) -> None:
    response = httpx.get(
        f"{real_server.url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(response.text)}  # type: ignore[no-untyped-call]
    assert names >= HISTOGRAMS


def test_what_is_in_force_is_what_the_engine_says(fake_server: RunningServer) -> None:
    """Not what it was told, which may be auto."""
    page = values(text_string_to_metric_families(httpx.get(f"{fake_server.url}/metrics").text))
    (labels,) = (dict(labels) for name, labels in page if name == "headway_runtime_info")
    assert (labels["kv_dtype"], labels["weight_compression"]) == ("bfloat16", "12-bit")

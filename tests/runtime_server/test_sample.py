"""The sample stays within its bound, whatever was counted, and loses nothing when it starts over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway_runtime.config import Envelope, Limits, Targets
from headway_runtime.draft_metrics import DraftSnapshot
from headway_runtime.histograms import NUM_EDGES, HistogramSnapshot
from headway_runtime.metrics import HISTOGRAM_NAMES, MetricsSnapshot
from headway_runtime.offload.counters import OffloadSnapshot
from headway_runtime.parallel.traffic import Traffic
from headway_runtime.server.messages import EngineState
from headway_runtime.server.sample import COUNTERS, MAX_SAMPLE_BYTES, SampleWriter
from headway_runtime.step_moments import MomentsSnapshot

ALL_COUNTERS = (*COUNTERS, "prefill_step_tokens", "decode_step_sequences")


def state(count: int, *, epoch: int = 1, counts: tuple[int, ...] | None = None) -> EngineState:
    """An engine whose every counter and bucket stands at `count`."""
    histogram = HistogramSnapshot(counts or (count,) * (NUM_EDGES + 1), count * 1234.5678)
    metrics = MetricsSnapshot(
        targets=Targets(ttft_milliseconds=123.456, tpot_milliseconds=None),
        targets_epoch=epoch,
        counters=dict.fromkeys(ALL_COUNTERS, count),
        rejected={},
        finished={},
        histograms=dict.fromkeys(HISTOGRAM_NAMES, histogram),
        sizes={},
        rates={},
        model_load_seconds=0.0,
        drafts=DraftSnapshot(),
        offload=OffloadSnapshot(),
        traffic=Traffic(),
        start_seconds={},
        cuda_graph_bytes=0,
        moments=MomentsSnapshot((count,) * 14 + (count * 1.26,), (0,) * 15, (count,) * 3, (count,) * 3),
    )
    return EngineState(
        instance="a" * 32,
        uptime_seconds=1e7 / 3,
        limits=Limits(1024, 131072),
        envelope=Envelope(1024, 131072),
        metrics=metrics,
        num_running=1024,
        num_waiting=100000,
        oldest_waiting_seconds=1e5 / 3,
        kv_blocks_used=10**6,
        kv_blocks_total=10**6,
        kv_blocks_cached=0,
        kv_wasted_share=0.0,
    )


def write(writer: SampleWriter, engine_state: EngineState) -> Any:
    body = writer.write(engine_state, is_draining=True)
    assert len(body) <= MAX_SAMPLE_BYTES
    return json.loads(body)


def test_a_sample_has_every_field_of_version_1() -> None:
    sample = write(SampleWriter(), state(3, counts=(0, 0, 3) + (0,) * (NUM_EDGES - 2)))
    assert sample["version"] == 1
    assert sample["instance"] == "a" * 32
    assert sample["edges"] == {"first_milliseconds": 1.0, "ratio": 1.12, "count": 105}
    assert sample["histograms"]["ttft"] == {"first": 2, "counts": [3], "sum": 3703.703}
    assert sample["counters"] == dict.fromkeys(COUNTERS, 3)
    assert sample["moments"] == {
        "decode_steps": [3] * 14 + [3.8],
        "prompt_steps": [0] * 15,
        "prompts": [3, 3, 3],
        "answers": [3, 3, 3],
        "gaps": [3, 3703.7],
    }
    assert set(sample["histograms"]) == {"ttft", "queue", "prefill", "tpot", "step", "e2e"}
    assert sample["targets"] == {
        "ttft_milliseconds": 123.456,
        "tpot_milliseconds": None,
        "e2e_milliseconds": None,
        "epoch": 1,
    }


def test_an_engine_that_did_nothing_has_empty_histograms() -> None:
    sample = write(SampleWriter(), state(0))
    assert sample["histograms"]["step"] == {"first": 0, "counts": [], "sum": 0.0}


@pytest.mark.parametrize("step", [1, 997, 12_345_678])
def test_the_bound_holds_as_counts_grow_and_nothing_is_lost(step: int) -> None:
    """A reader adds up increments, from zero after a new instance, as it does when a replica restarts."""
    is_within_a_sample = step < 1000  # what happens between two of them fits into one
    writer = SampleWriter()
    seen, last = 0, 0
    instances: list[str] = []
    for number in range(1, 401):
        sample = write(writer, state(number * step))
        if instances[-1:] != [sample["instance"]]:
            instances.append(sample["instance"])
            last = 0
        count = sample["counters"]["finished"]
        assert count >= last
        assert sample["moments"]["prompts"] == [count] * 3
        if is_within_a_sample:
            assert set(sample["histograms"]["ttft"]["counts"]) == {count}
        seen += count - last
        last = count
    if is_within_a_sample:
        assert seen == 400 * step
    assert (len(instances) > 1) == (step > 1)
    assert len(set(instances)) == len(instances)


def test_a_first_sample_that_would_be_too_long_starts_from_now() -> None:
    writer = SampleWriter()
    first = write(writer, state(10**12))
    assert first["counters"]["finished"] == 0
    assert first["instance"] != "a" * 32
    second = write(writer, state(10**12 + 5))
    assert (second["instance"], second["counters"]["finished"]) == (first["instance"], 5)


def test_counters_that_restart_with_their_targets_are_not_counted_from_before() -> None:
    writer = SampleWriter()
    write(writer, state(10**12))
    sample = write(writer, state(10**12 + 5, epoch=2))
    assert sample["counters"]["ttft_met"] == 10**12 + 5
    assert sample["counters"]["finished"] == 5

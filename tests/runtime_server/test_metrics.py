"""The engine's counters: buckets, exact SLO counters, and what counts as a miss."""

import pytest

from headway_runtime.config import Targets
from headway_runtime.histograms import EDGES_MILLISECONDS, NUM_EDGES, Histogram
from headway_runtime.metrics import EngineMetrics, RejectReason
from headway_runtime.request import FinishReason


def slo_counters(metrics: EngineMetrics) -> tuple[int, int, int, int]:
    counters = metrics.snapshot().counters
    return (
        counters["ttft_met"],
        counters["ttft_missed"],
        counters["tpot_met"],
        counters["tpot_missed"],
    )


@pytest.mark.parametrize(
    ("milliseconds", "want_bucket"),
    [
        (-0.001, 0),
        (0.0, 0),
        (1.0, 0),
        (1.0001, 1),
        (EDGES_MILLISECONDS[50] * 0.9999, 50),
        (EDGES_MILLISECONDS[50] * 1.0001, 51),
        (EDGES_MILLISECONDS[-1] * 0.9999, NUM_EDGES - 1),
        (EDGES_MILLISECONDS[-1] * 1.0001, NUM_EDGES),
        (1e9, NUM_EDGES),
    ],
)
def test_a_value_is_counted_in_the_first_bucket_whose_edge_is_not_below_it(
    milliseconds: float, want_bucket: int
) -> None:
    histogram = Histogram()
    histogram.observe(milliseconds / 1000.0)
    counts = histogram.snapshot().counts
    assert len(counts) == NUM_EDGES + 1
    assert [index for index, count in enumerate(counts) if count] == [want_bucket]


def test_edges_cover_a_millisecond_to_two_minutes() -> None:
    assert EDGES_MILLISECONDS[0] == 1.0
    assert EDGES_MILLISECONDS[-1] > 120_000.0


def test_slo_counters_are_exact_against_the_targets_in_force() -> None:
    metrics = EngineMetrics(Targets(ttft_milliseconds=100.0, tpot_milliseconds=20.0))
    for ttft_seconds in (0.05, 0.0999, 0.1001, 0.5):
        metrics.first_byte(ttft_seconds)
    metrics.finished(FinishReason.STOP, 1.0, 0.019)
    metrics.finished(FinishReason.LENGTH, 1.0, 0.021)
    metrics.finished(FinishReason.LENGTH, 1.0, None)
    assert slo_counters(metrics) == (2, 2, 1, 1)


def test_whole_answers_are_judged_once_each_however_they_end() -> None:
    metrics = EngineMetrics(Targets(e2e_milliseconds=2000.0))
    metrics.finished(FinishReason.STOP, 2.0, 0.01)
    metrics.finished(FinishReason.LENGTH, 2.001, None)
    metrics.finished(FinishReason.ERROR, 0.1, None)
    metrics.finished(FinishReason.ABORT, 1.9, None)  # nobody can say
    metrics.finished(FinishReason.ABORT, 2.1, None)  # it was late already
    metrics.rejected(RejectReason.QUEUE_FULL)
    metrics.rejected(RejectReason.INVALID)  # its client's own fault
    counters = metrics.snapshot().counters
    assert (counters["e2e_met"], counters["e2e_missed"]) == (1, 4)
    assert slo_counters(metrics) == (0, 0, 0, 0)
    metrics.set_targets(Targets(e2e_milliseconds=1000.0))
    counters = metrics.snapshot().counters
    assert (counters["e2e_met"], counters["e2e_missed"]) == (0, 0)


def test_new_targets_restart_the_exact_counters_and_the_same_targets_do_not() -> None:
    metrics = EngineMetrics(Targets(ttft_milliseconds=100.0))
    metrics.first_byte(0.2)
    metrics.set_targets(Targets(ttft_milliseconds=100.0))
    assert (metrics.targets_epoch, slo_counters(metrics)) == (1, (0, 1, 0, 0))
    metrics.set_targets(Targets(ttft_milliseconds=300.0))
    assert (metrics.targets_epoch, slo_counters(metrics)) == (2, (0, 0, 0, 0))
    metrics.first_byte(0.2)
    assert slo_counters(metrics) == (1, 0, 0, 0)


def test_without_targets_nothing_is_met_or_missed() -> None:
    metrics = EngineMetrics()
    metrics.first_byte(0.2)
    metrics.rejected(RejectReason.QUEUE_FULL)
    metrics.finished(FinishReason.STOP, 1.0, 0.02)
    assert slo_counters(metrics) == (0, 0, 0, 0)


def test_overload_is_a_ttft_miss_and_a_fault_of_the_client_is_not() -> None:
    metrics = EngineMetrics(Targets(ttft_milliseconds=100.0, tpot_milliseconds=20.0))
    metrics.rejected(RejectReason.QUEUE_FULL)
    metrics.rejected("queue_full")
    metrics.rejected(RejectReason.CONTEXT_LENGTH)
    metrics.rejected("invalid")
    metrics.finished(FinishReason.ABORT, 1.0, 0.5)
    metrics.finished(FinishReason.ERROR, 1.0, 0.5)
    metrics.first_byte_missed()
    snapshot = metrics.snapshot()
    assert slo_counters(metrics) == (0, 3, 0, 0)
    assert snapshot.counters["rejected"] == 2
    assert {reason: count for reason, count in snapshot.rejected.items() if count} == {
        "queue_full": 2,
        "context_length": 1,
        "invalid": 1,
    }
    assert sum(snapshot.histograms["tpot"].counts) == sum(snapshot.histograms["e2e"].counts) == 0


def test_an_unknown_reason_is_an_error() -> None:
    with pytest.raises(ValueError, match="because"):
        EngineMetrics().rejected("because")


def test_a_snapshot_is_a_copy() -> None:
    metrics = EngineMetrics()
    before = metrics.snapshot()
    metrics.step(0.01, 5, 3)
    metrics.tokens(prompt_computed=5, cached=2, generated=3)
    assert before.counters["steps"] == 0
    after = metrics.snapshot().counters
    assert (after["steps"], after["prompt_tokens"], after["cached_tokens"], after["generated_tokens"]) == (
        1,
        5,
        2,
        3,
    )

"""Every metric against values computed by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headway_bench.record import INTERRUPTED, Record
from headway_bench.summary import Summary, itl_samples, meets, summarize
from headway_bench.warnings_of import warnings_of
from headway_bench.workload import random_stream

MakeRecord = Callable[..., Record]


def summed(records: Sequence[Record], objectives: dict[str, float] | None = None, **use: Any) -> Summary:
    given = {"cpu_seconds": 0.1, "wall_seconds": 1.0, "connections_opened": 1, **use}
    return summarize(records, objectives or {}, 0.95, random_stream(0), **given)


def test_one_request_is_measured_from_its_sending(make_record: MakeRecord) -> None:
    record = make_record((100, 120, 160), ended_milliseconds=170, due_at=9.97)
    assert record.ttft_seconds == pytest.approx(0.100)
    assert record.tpot_seconds == pytest.approx(0.030)
    assert record.e2e_seconds == pytest.approx(0.170)
    latencies = summed([record]).latency_milliseconds
    values = {name: found.mean for name, found in latencies.items() if found is not None}
    assert values == pytest.approx(
        {"ttft": 100, "tpot": 30, "itl": 30, "e2e": 170, "ttft_from_due": 130, "e2e_from_due": 200}
    )


def test_tokens_that_arrive_together_share_their_time(make_record: MakeRecord) -> None:
    record = make_record((100, 140, 150), tokens=(2, 4, 1))
    values, weights = itl_samples(record)
    assert values == pytest.approx([0.010, 0.010])
    assert weights == [4, 1]
    # 50 ms for the five tokens after the first event's two.
    assert record.tpot_seconds == pytest.approx(0.010)
    found = summed([record]).latency_milliseconds["itl"]
    assert found is not None
    assert found.count == 5


def test_itl_is_weighted_over_requests_by_tokens(make_record: MakeRecord) -> None:
    slow = make_record((0, 100), tokens=(1, 1))
    fast = make_record((0, 90), tokens=(1, 9))
    found = summed([slow, fast]).latency_milliseconds["itl"]
    assert found is not None
    assert found.mean == pytest.approx((100 + 9 * 10) / 10)
    assert found.percentiles[50].value == pytest.approx(10)
    assert found.percentiles[99].value == pytest.approx(100)


def test_tokens_without_text_at_the_end_take_none_of_the_time_between_events(make_record: MakeRecord) -> None:
    told = make_record((100, 110, 120), completion_tokens=4)
    assert told.tpot_seconds == pytest.approx(0.010)
    untold = make_record((100, 130), count_source="events", completion_tokens=7)
    assert untold.tpot_seconds == pytest.approx(0.030 / 6)


def test_an_answer_of_one_event_has_no_tpot(make_record: MakeRecord) -> None:
    assert make_record((100,)).tpot_seconds is None
    assert summed([make_record((100,))]).latency_milliseconds["tpot"] is None


def test_rates_are_over_the_time_from_first_sending_to_last_end(make_record: MakeRecord) -> None:
    records = [make_record(sent_at=10.0 + n, due_at=10.0 + n, ended_at=12.0 + n) for n in range(3)]
    summary = summed(records)
    assert summary.duration_seconds == pytest.approx(4.0)
    assert summary.completed_per_second == pytest.approx(3 / 4)
    assert summary.sending_per_second == pytest.approx(1.0)
    assert summary.output_tokens_per_second == pytest.approx(9 / 4)
    assert summary.input_tokens_per_second == pytest.approx(24 / 4)


def test_warm_up_failures_and_interrupted_requests_are_kept_apart(make_record: MakeRecord) -> None:
    records = [
        make_record((500,), is_warmup=True),
        make_record((100,)),
        make_record((), failure="timeout", failure_detail="over 3 s"),
        make_record((), failure="http_503", failure_detail="full"),
        make_record((), failure="http_503", failure_detail="still full"),
        make_record((), failure=INTERRUPTED),
    ]
    summary = summed(records, {"ttft": 200})
    counts = (summary.num_warmup, summary.num_measured, summary.num_completed, summary.num_failed)
    assert counts == (1, 5, 1, 3)
    assert summary.num_interrupted == 1
    assert [(kind, f.count, f.example) for kind, f in summary.failures.items()] == [
        ("http_503", 2, "full"),
        ("timeout", 1, "over 3 s"),
    ]
    assert summary.goodput is not None
    assert summary.goodput.share.value == pytest.approx(1 / 4), (
        "failures miss, the interrupted does not count"
    )
    found = summary.latency_milliseconds["ttft"]
    assert found is not None
    assert found.maximum == pytest.approx(100)


def test_goodput_needs_every_objective(make_record: MakeRecord) -> None:
    good = make_record((100, 120), ended_milliseconds=130)
    assert meets(good, {"ttft": 100.001, "tpot": 20.001, "e2e": 130.001})
    for name, limit in (("ttft", 99), ("tpot", 19), ("e2e", 129)):
        assert not meets(good, {"ttft": 1000, "tpot": 1000, "e2e": 1000, name: limit}), name
    summary = summed([good, make_record((300, 310))], {"ttft": 250})
    assert summary.goodput is not None
    assert summary.goodput.share.value == 0.5
    assert summary.goodput.requests_per_second == pytest.approx(1 / 0.310)


def test_an_answer_without_content_is_held_to_its_end(make_record: MakeRecord) -> None:
    empty = make_record((), ended_milliseconds=80)
    assert meets(empty, {"ttft": 90, "tpot": 1})
    assert not meets(empty, {"ttft": 70})
    assert summed([empty]).num_without_content == 1


def test_nothing_completed_is_told_and_not_divided_by(make_record: MakeRecord) -> None:
    summary = summed([make_record((), failure="connect")], {"ttft": 1})
    assert summary.tokens is None
    assert set(summary.latency_milliseconds.values()) == {None}
    assert summary.completed_per_second == 0
    assert summed([]).num_measured == 0


def test_lengths_are_compared_with_what_was_asked(make_record: MakeRecord) -> None:
    records = [
        make_record(),
        make_record(prompt_tokens=9),
        make_record(completion_tokens=2),
        # A later turn holds the answers before it: its whole length is nobody's wish.
        make_record(turn=1, prompt_tokens=99),
    ]
    tokens = summed(records).tokens
    assert tokens is not None
    assert tokens.input_as_wanted is not None
    assert tokens.input_as_wanted.value == pytest.approx(2 / 3)
    assert tokens.output_as_wanted.value == pytest.approx(3 / 4)
    warnings = warnings_of(summed(records))
    assert any("33% of the prompts" in warning for warning in warnings)
    assert any("25% of the answers" in warning for warning in warnings)


def test_a_client_that_is_late_or_busy_says_so(make_record: MakeRecord) -> None:
    assert warnings_of(summed([make_record()])) == []
    (late,) = warnings_of(summed([make_record(due_at=9.985)]))
    assert "sent late (P99 15.0 ms)" in late
    assert warnings_of(summed([make_record((200, 210), due_at=9.985)])) == [], "little beside the TTFT"
    (busy,) = warnings_of(summed([make_record()], cpu_seconds=0.9))
    assert "90% of a core" in busy


def test_events_of_unknown_size_are_told(make_record: MakeRecord) -> None:
    record = make_record(count_source="events", completion_tokens=9, output_tokens_wanted=9)
    (warning,) = warnings_of(summed([record]))
    assert "ITL is between events" in warning

"""Attainment on evidence that is censored, refused, too little or gone."""

from typing import Any

import pytest

from headway_operator.samples import GatewaySample, Sample
from headway_operator.slo import evidence
from headway_operator.slo.evidence import Load
from headway_operator.slo.slices import Slice
from headway_operator.slo.window import Recent

NOW = 1000.0


def slices(*per_ten_seconds: dict[str, float]) -> Recent:
    """Slices of 10 s, the last ending now."""
    first = NOW - 10 * len(per_ten_seconds)
    return Recent(
        [Slice(first + 10 * i, first + 10 * i + 10, totals) for i, totals in enumerate(per_ten_seconds)]
    )


def test_judges_thirty_seconds_when_they_hold_evidence_enough(build: Any) -> None:
    happened = slices({"ttft_missed": 50}, {"ttft_met": 30}, {"ttft_met": 30}, {"ttft_met": 30})
    ttft, _ = evidence.attainments(build.target(), happened, Load(), NOW)
    assert (ttft.met, ttft.missed, ttft.verdict) == (90, 0, "met")


def test_grows_the_window_until_there_is_evidence(build: Any) -> None:
    happened = slices(*[{"ttft_met": 7.0}] * 12)
    ttft, _ = evidence.attainments(build.target(), happened, Load(), NOW)
    assert (ttft.met, ttft.verdict) == (84, "met")


def test_evidence_from_before_the_last_change_does_not_count(build: Any) -> None:
    happened = slices({"ttft_missed": 50}, {"ttft_met": 5})
    ttft, _ = evidence.attainments(build.target(), happened, Load(), NOW, since=NOW - 10)
    assert (ttft.met, ttft.missed, ttft.verdict) == (5, 0, "unknown")


def test_waiting_requests_older_than_the_target_are_misses_already(build: Any) -> None:
    replica = build.sample(NOW, waiting=10, oldest_waiting_seconds=0.6)
    sample = Sample(NOW, {"a": replica})
    load = evidence.load(build.target(), slices({}), sample, NOW)
    assert load.late == 5
    ttft, _ = evidence.attainments(build.target(), slices({}), load, NOW)
    assert (ttft.met, ttft.missed, ttft.verdict) == (0, 5, "violated")
    assert ttft.p_milliseconds is not None
    assert 300 < ttft.p_milliseconds < 600


def test_waiting_below_the_target_is_no_miss(build: Any) -> None:
    replica = build.sample(NOW, waiting=10, oldest_waiting_seconds=0.3)
    assert evidence.load(build.target(), slices({}), Sample(NOW, {"a": replica}), NOW).late == 0


def test_waiting_at_the_gateway_counts_like_waiting_at_a_replica(build: Any) -> None:
    gateway = GatewaySample("g", NOW, waiting=4, oldest_waiting_seconds=3.0, in_flight=0, counters={})
    load = evidence.load(build.target(), slices({}), Sample(NOW, {}, {"g": gateway}), NOW)
    assert (load.waiting, load.late, load.oldest_waiting_seconds) == (4, 4, 3.0)


def test_requests_turned_away_are_misses(build: Any) -> None:
    happened = slices({"refused": 5, "ttft_missed": 3})
    ttft, _ = evidence.attainments(build.target(), happened, Load(), NOW)
    assert ttft.missed == 8
    assert evidence.load(build.target(), happened, Sample(NOW), NOW).ttft_missed == 8


def test_no_traffic_is_zero_load_and_no_verdict(build: Any) -> None:
    load = evidence.load(build.target(), Recent(()), Sample(NOW, {"a": build.sample(NOW)}), NOW)
    ttft, tpot = evidence.attainments(build.target(), Recent(()), load, NOW)
    assert (load.running, load.waiting, load.kv_use, load.queue_milliseconds) == (0, 0, 0.0, 0.0)
    assert (ttft.verdict, ttft.p_milliseconds) == ("unknown", None)
    assert (tpot.verdict, tpot.p_milliseconds) == ("unknown", None)


@pytest.mark.parametrize(
    ("age", "used", "errors"),
    [(19.0, ["a", "g"], {}), (21.0, [], dict.fromkeys("ag", "its sample is 21 s old"))],
    ids=["fresh", "stale"],
)
def test_stale_samples_are_not_used(build: Any, age: float, used: list[str], errors: dict[str, str]) -> None:
    gateway = GatewaySample("g", NOW - age, 400, 60.0, 400, {})
    sample = Sample(NOW, {"a": build.sample(NOW - age), "b": None}, {"g": gateway, "h": None})
    found = evidence.fresh(sample, NOW)
    told = {**found.replicas, **found.gateways}
    assert [name for name, one in told.items() if one is not None] == used
    assert dict(found.errors) == errors


def test_the_last_slice_is_recent_however_far_passes_are_apart(build: Any) -> None:
    happened = Recent([Slice(NOW - 30, NOW, {"ttft_missed": 2})])
    assert evidence.load(build.target(), happened, Sample(NOW), NOW).ttft_missed == 2


def test_looks_no_further_back_than_the_promise_says(build: Any) -> None:
    longest = build.target().window_seconds
    assert evidence.windows(longest) == [30.0, 60.0, 120.0, 300.0]
    assert evidence.windows(90.0) == [30.0, 60.0, 90.0]
    assert evidence.windows(30.0) == [30.0]
    long_ago = slices({"ttft_met": 200.0}, *[{}] * 19)
    ttft, _ = evidence.attainments(build.target(), long_ago, Load(), NOW)
    assert (ttft.verdict, ttft.met) == ("met", 200)
    ttft, _ = evidence.attainments(build.target(window_seconds=120.0), long_ago, Load(), NOW)
    assert (ttft.verdict, ttft.met) == ("unknown", 0)

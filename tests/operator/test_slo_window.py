"""What happened in the last minutes, from totals that only grow, restart or disappear."""

import json
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import GatewaySample, ReplicaSample, Sample, Targets
from headway_operator.slo.baselines import Baseline, of_gateway, of_replica
from headway_operator.slo.growth import NO_COLUMNS, Columns
from headway_operator.slo.slices import Slice, joined
from headway_operator.slo.window import Recent, advance
from headway_operator.state import Observed

TARGETS = Targets(300.0, 40.0)
State = tuple[tuple[Slice, ...], dict[str, Baseline], Columns]
EMPTY: State = ((), {}, NO_COLUMNS)


def step(
    build: Any,
    state: State,
    now: float,
    replicas: dict[str, ReplicaSample | None],
    *,
    targets: Targets = TARGETS,
    created_at: float = 500.0,
    began_at: float = 100.0,
    changed_at: float = 0.0,
    gateways: dict[str, GatewaySample | None] | None = None,
) -> State:
    observed = Observed(replicas=tuple(build.replica(name, created_at=created_at) for name in replicas))
    sample = Sample(now, replicas, gateways or {})
    return advance(state[0], state[1], sample, observed, targets, began_at, changed_at, state[2])[:3]


def counted(state: State) -> dict[str, float]:
    return counted_in(joined(state[0]))


def counted_in(whole: Slice) -> dict[str, float]:
    """Without the time of replicas, which passes whatever they do."""
    return {name: value for name, value in whole.totals.items() if name != "replica_seconds"}


def test_sums_what_each_replica_added_since_the_last_pass(build: Any) -> None:
    first = {
        "a": build.sample(1000, counters={"ttft_met": 10, "ttft_missed": 1}),
        "b": build.sample(1000, counters={"ttft_met": 100}),
    }
    then = {
        "a": build.sample(1005, counters={"ttft_met": 13, "ttft_missed": 2}),
        "b": build.sample(1005, counters={"ttft_met": 101}),
    }
    state = step(build, EMPTY, 1000, first, created_at=0.0)
    state = step(build, state, 1005, then, created_at=0.0)
    assert counted(state) == {"ttft_met": 4, "ttft_missed": 1}


def test_a_replica_older_than_the_memory_only_marks_a_beginning(build: Any) -> None:
    old = step(build, EMPTY, 1000, {"a": build.sample(1000, counters={"ttft_met": 10})}, created_at=99.0)
    young = step(build, EMPTY, 130, {"a": build.sample(130, counters={"ttft_met": 10})}, created_at=101.0)
    assert counted(old) == {}
    assert counted(young) == {"ttft_met": 10}


def test_a_restarted_engine_counts_from_zero_even_when_its_totals_are_higher(build: Any) -> None:
    state = step(build, EMPTY, 1000, {"a": build.sample(1000, counters={"ttft_met": 10})}, created_at=0.0)
    restarted = build.sample(1005, instance="two", counters={"ttft_met": 12})
    state = step(build, state, 1005, {"a": restarted}, created_at=0.0)
    assert counted(state) == {"ttft_met": 12}


def test_a_dead_replica_leaves_its_last_increments_and_a_lost_sample_loses_none(build: Any) -> None:
    state = step(build, EMPTY, 1000, {"a": build.sample(1000), "b": build.sample(1000)}, created_at=0.0)
    hit = build.sample(1005, counters={"ttft_missed": 7})
    state = step(build, state, 1005, {"a": hit, "b": None}, created_at=0.0)
    state = step(build, state, 1010, {"b": build.sample(1010, counters={"ttft_met": 5})}, created_at=0.0)
    assert counted(state) == {"ttft_missed": 7, "ttft_met": 5, "blind": 1.0}
    assert set(state[1]) == {"b"}


def test_exact_counters_count_only_while_judged_by_the_targets_asked_for(build: Any) -> None:
    new = Targets(200.0, 40.0)
    state = step(build, EMPTY, 1000, {"a": build.sample(1000, counters={"ttft_met": 10})}, created_at=0.0)
    still_old = build.sample(1005, counters={"ttft_met": 20, "tpot_met": 3})
    state = step(build, state, 1005, {"a": still_old}, targets=new, created_at=0.0)
    assert counted(state) == {"tpot_met": 3}
    # All restarted at the change; 25 is more than the 20 before it, and still all of it is new.
    judged_anew = build.sample(1010, targets=new, counters={"ttft_met": 25, "tpot_met": 2})
    state = step(build, state, 1010, {"a": judged_anew}, targets=new, created_at=0.0)
    assert counted(state) == {"ttft_met": 25, "tpot_met": 5}


def test_a_long_time_without_a_pass_is_no_evidence(build: Any) -> None:
    state = step(build, EMPTY, 1000, {"a": build.sample(1000)}, created_at=0.0)
    late = build.sample(1100, counters={"ttft_missed": 50})
    state = step(build, state, 1100, {"a": late}, created_at=0.0)
    assert counted(state) == {}


def test_slices_are_few_and_none_spans_a_change(build: Any) -> None:
    state = EMPTY
    for second in range(1, 1000):
        state = step(build, state, 100.0 + second, {"a": build.sample(100.0 + second)}, created_at=0.0)
    assert len(state[0]) <= 80
    changed = 100.0 + 999
    for second in range(1000, 1003):
        sample = {"a": build.sample(100.0 + second)}
        state = step(build, state, 100.0 + second, sample, created_at=0.0, changed_at=changed)
    assert state[0][-1].start == changed


def test_what_gateways_turned_away_is_counted(build: Any) -> None:
    state = EMPTY
    for now, rejected in ((1000.0, 4), (1005.0, 9)):
        gateway = GatewaySample("g", now, 0, 0.0, 0, {"rejected": rejected})
        state = step(build, state, now, {}, gateways={"gateway": gateway})
    assert counted(state) == {"refused": 5}


@pytest.mark.parametrize(
    ("gateway_rejected", "want"),
    [
        (1, {"ttft_met": 2, "ttft_missed": 3, "refused": 1}),
        (None, {"ttft_met": 2, "ttft_missed": 3, "refused": 4, "blind": 1.0}),
    ],
    ids=["by the gateway's count", "by the replicas' count while the gateway is silent"],
)
def test_a_request_that_one_replica_turned_away_and_another_served_is_no_miss(
    build: Any, gateway_rejected: int | None, want: dict[str, float]
) -> None:
    # Of the 4 that replica a turned away, and counted as missed, b served 3.
    before = GatewaySample("g", 1000.0, 0, 0.0, 0, {"rejected": 0})
    after = None if gateway_rejected is None else replace(before, counters={"rejected": gateway_rejected})
    zeros = {"a": build.sample(1000), "b": build.sample(1000)}
    then = {
        "a": build.sample(1005, counters={"rejected": 4, "ttft_missed": 4}),
        "b": build.sample(1005, counters={"ttft_met": 2, "ttft_missed": 3}),
    }
    state = step(build, EMPTY, 1000, zeros, created_at=0.0, gateways={"gateway": before})
    state = step(build, state, 1005, then, created_at=0.0, gateways={"gateway": after})
    assert counted(state) == want


def test_histograms_are_summed_by_bucket(build: Any) -> None:
    state = step(build, EMPTY, 1000, {"a": build.sample(1000), "b": build.sample(1000)}, created_at=0.0)
    hit = {"ttft": build.histogram({100.0: 2}), "queue": build.histogram({50.0: 2})}
    both = {name: build.sample(1005, histograms=hit) for name in ("a", "b")}
    whole = joined(step(build, state, 1005, both, created_at=0.0)[0])
    assert list(whole.counts["ttft"].values()) == [4]
    assert counted_in(whole) == {"queue_milliseconds": 200.0, "queue_count": 4}


def test_sums_since_a_time_are_those_of_the_slices_that_began_then() -> None:
    counted = [
        Slice(10.0 * i, 10.0 * i + 10.0, {"arrived": 1.0 + i}, {"ttft": {i % 3: i + 1}}) for i in range(12)
    ]
    happened = Recent(counted)
    # In an order that lets longer times build on shorter ones, and shorter ones not on longer.
    for start in (100.0, 55.0, 110.0, 0.0, 100.0, 200.0):
        want = joined(one for one in counted if one.start >= start)
        assert happened.totals(start) == want.totals
        assert happened.counts("ttft", start) == want.counts.get("ttft", {})
        assert happened.seconds(start) == want.end - want.start
    assert happened.totals(200.0, least=1) == {"arrived": 12.0}
    assert Recent(()).totals(0.0, least=1) == {}


def test_whole_answers_are_counted_from_when_they_are_promised(build: Any) -> None:
    promised = replace(TARGETS, e2e_milliseconds=1000.0)

    def told(state: State, now: float, num: int, targets: Targets) -> State:
        hit = {"e2e": build.histogram({900.0: num})}
        one = replace(build.sample(now, histograms=hit), targets=targets)
        return step(build, state, now, {"a": one}, created_at=0.0, targets=targets)

    state = told(EMPTY, 1000, 5, TARGETS)
    state = told(told(state, 1005, 7, TARGETS), 1010, 9, promised)
    assert "e2e" not in joined(state[0]).counts
    state = told(state, 1015, 12, promised)
    assert list(joined(state[0]).counts["e2e"].values()) == [3]


def test_a_count_that_went_back_in_the_same_instance_is_a_new_beginning(build: Any) -> None:
    state = EMPTY
    for at, met in ((1000, 10), (1005, 4), (1010, 7)):
        one = build.sample(at, counters={"ttft_met": met}, histograms={"ttft": build.histogram({100.0: met})})
        state = step(build, state, at, {"a": one}, created_at=0.0)
    whole = joined(state[0])
    assert whole.total("ttft_met") == 3
    assert list(whole.counts["ttft"].values()) == [3]


@pytest.mark.parametrize("fallen", [999_950, 0])
def test_where_a_gateways_count_went_back_replicas_tell_what_came(build: Any, fallen: int) -> None:
    state = EMPTY
    for number, received in enumerate((1_000_000, 1_000_100, fallen, fallen + 100)):
        at = 1000 + 5 * number
        gateway = GatewaySample("g", at, 0, 0.0, 0, {"rejected": 0, "received": received})
        replica = build.sample(at, counters={"received": 500_000 + 100 * number})
        state = step(build, state, at, {"a": replica}, gateways={"g": gateway}, created_at=0.0)
    assert [one.total("arrived") for one in state[0]] == [100.0, 100.0, 100.0]


def test_a_baseline_survives_being_written_down(build: Any) -> None:
    one = build.sample(1000, counters={"ttft_met": 10}, histograms={"ttft": build.histogram({100.0: 9})})
    for baseline in (of_replica(one), of_gateway(GatewaySample("g", 1.0, 0, 0.0, 0, {"rejected": 3}))):
        assert Baseline.from_dict(json.loads(json.dumps(baseline.to_dict()))) == baseline


def test_what_runs_is_summed_up_at_each_sample(build: Any) -> None:
    """So that memory per sequence is a mean over minutes, and is known while nothing runs for a moment."""
    state = EMPTY
    for now, running in ((1000, 4), (1005, 0), (1010, 6)):
        one = build.sample(now, running=running, kv_blocks_used=10 * running, kv_blocks_total=400)
        state = step(build, state, now, {"a": one, "b": None})
    totals = joined(state[0]).totals
    assert totals["ran"] == 10
    assert totals["kv_held"] == pytest.approx(0.25)


def test_the_time_of_replicas_counts_those_that_give_no_sample_and_no_gap(build: Any) -> None:
    state, one = EMPTY, build.sample(1000)
    for now, count in ((1000, 2), (1005, 2), (1010, 3), (1100, 3)):
        replicas = {f"r{number}": one if number else None for number in range(count)}
        state = step(build, state, now, replicas, began_at=1000.0)
    assert joined(state[0]).totals["replica_seconds"] == 5.0 * 2 + 5.0 * 3


def gateway(now: float, received: int) -> GatewaySample:
    return GatewaySample("g", now, 0, 0.0, 0, {"rejected": 0, "received": received})


def test_what_one_counted_while_nobody_heard_of_it_for_long_is_left_out(build: Any) -> None:
    """It may have been any time in these minutes, so that it says nothing of now."""
    state = step(build, EMPTY, 1000, {"a": build.sample(1000), "b": build.sample(1000)}, created_at=0.0)
    for second in range(1005, 1100, 5):
        alone = build.sample(second, counters={"ttft_met": second - 1000})
        state = step(build, state, second, {"a": alone, "b": None}, created_at=0.0)
    both = {
        "a": build.sample(1100, counters={"ttft_met": 100}),
        "b": build.sample(1100, counters={"ttft_missed": 50}),
    }
    state = step(build, state, 1100, both, created_at=0.0)
    assert counted(state)["ttft_met"] == 100
    assert "ttft_missed" not in counted(state)
    then = {"a": both["a"], "b": build.sample(1105, counters={"ttft_missed": 53})}
    state = step(build, state, 1105, then, created_at=0.0)
    assert counted(state)["ttft_missed"] == 3


def test_what_comes_is_what_replicas_receive_while_a_gateway_is_silent_for_long(build: Any) -> None:
    """Two requests a second; one of both gateways says nothing from 1,005 to 1,200."""

    def replicas(now: float) -> dict[str, ReplicaSample | None]:
        return {name: build.sample(now, counters={"received": int(now - 1000)}) for name in ("a", "b")}

    def rates(until: float) -> list[float]:
        return [one.count / (one.end - one.start) for one in Recent(state[0]).arrivals if one.end <= until]

    state = EMPTY
    for now in range(1000, 1300, 5):
        is_silent = 1005 < now < 1200
        one, other = gateway(now, now - 1000), None if is_silent else gateway(now, now - 1000)
        state = step(build, state, now, replicas(now), created_at=0.0, gateways={"g": one, "h": other})
        if now == 1070:
            assert rates(now)[-1] == pytest.approx(2.0), "as soon as it has said nothing for a minute"
    assert rates(1300) == pytest.approx([2.0] * len(rates(1300)))
    assert sum(one.end - one.start for one in Recent(state[0]).arrivals) == pytest.approx(300 - 5 - 60, abs=6)


def test_replicas_that_tell_stand_for_one_that_does_not(build: Any) -> None:
    state = EMPTY
    for now in range(1000, 1200, 5):
        told = build.sample(now, counters={"received": now - 1000})
        lone = {"a": told, "b": told, "c": None if now > 1000 else told}
        state = step(build, state, now, lone, created_at=0.0)
    last = Recent(state[0]).arrivals[-1]
    assert last.count / (last.end - last.start) == pytest.approx(3.0)


def test_passes_that_are_always_far_apart_are_evidence(build: Any) -> None:
    """An operator with an interval of minutes."""
    state = EMPTY
    for number in range(6):
        now = 1000.0 + 200.0 * number
        state = step(
            build, state, now, {"a": build.sample(now, counters={"ttft_met": 10 * number})}, created_at=0.0
        )
    assert Recent(state[0]).totals(now - 300.0, least=1)["ttft_met"] == 10.0
    seen = build.sample(now + 900.0, counters={"ttft_met": 500})
    state = step(build, state, now + 900.0, {"a": seen}, created_at=0.0)
    assert not Recent(state[0]).totals(now + 600.0, least=1), "one that is longer than all others"


def test_a_pass_that_was_late_makes_no_old_counts_new(build: Any) -> None:
    """Two gateways, of which one is silent for two minutes; one pass comes a minute late."""
    state = EMPTY
    for now in (*range(1000, 1140, 5), 1205, 1210, 1215):
        is_silent = 1005 < now < 1210
        one, other = gateway(now, now - 1000), None if is_silent else gateway(now, now - 1000)
        told = {"a": build.sample(now, counters={"received": 2 * (now - 1000)})}
        state = step(build, state, now, told, created_at=0.0, gateways={"g": one, "h": other})
    rates = [one.count / (one.end - one.start) for one in Recent(state[0]).arrivals]
    assert max(rates) == pytest.approx(2.0)


def test_replicas_that_tell_again_after_a_while_stand_for_that_while(build: Any) -> None:
    """One of two gateways is lost for good; each replica in turn misses a pass."""
    state = EMPTY
    for number, now in enumerate(range(1000, 1400, 5)):
        told: dict[str, ReplicaSample | None] = {
            name: build.sample(now, counters={"received": now - 1000}) if number % 4 != place else None
            for place, name in enumerate("abcd")
        }
        lost = gateway(now, 0) if number == 0 else None
        state = step(build, state, now, told, created_at=0.0, gateways={"g": gateway(now, 0), "h": lost})
    later = [one for one in Recent(state[0]).arrivals if one.end > 1150]
    assert sum(one.count for one in later) / sum(one.end - one.start for one in later) == pytest.approx(
        4.0, rel=0.01
    )


def test_a_checkpoint_that_says_not_when_is_of_the_last_pass(build: Any) -> None:
    """Of an earlier version: nothing it knew was lost because of that."""
    state = step(
        build, EMPTY, 1000, {"a": build.sample(1000)}, created_at=0.0, gateways={"g": gateway(1000, 0)}
    )
    old = {name: one.to_dict() for name, one in state[1].items()}
    for one in old.values():
        del one["at"]
    state = (state[0], {name: Baseline.from_dict(one) for name, one in old.items()}, NO_COLUMNS)
    told = {"a": build.sample(1040, counters={"received": 400})}
    state = step(build, state, 1040, told, created_at=0.0, gateways={"g": gateway(1040, 400)})
    [span] = Recent(state[0]).arrivals
    assert (span.count, span.end - span.start) == (400.0, 40.0)


def test_a_gateway_that_has_just_come_is_not_lost(build: Any) -> None:
    state = EMPTY
    for now in (1000, 1005, 1010):
        gateways = {"g": gateway(now, 2 * (now - 1000)), "new": None if now == 1010 else gateway(now, 0)}
        del gateways["new" if now < 1010 else "g"]
        state = step(build, state, now, {"a": build.sample(now)}, created_at=0.0, gateways=gateways)
    assert (counted(state).get("lost"), counted(state)["blind"]) == (None, 1.0)


@pytest.mark.parametrize("bucket", ["-1", "106", "1000000000"])
def test_a_checkpoint_with_buckets_that_there_are_not_is_damaged(bucket: str) -> None:
    written = Slice(1.0, 6.0, {}, {"ttft": {3: 1}}).to_dict()
    assert Slice.from_dict(written).counts == {"ttft": {3: 1}}
    written["counts"]["ttft"][bucket] = 1
    with pytest.raises(ValueError, match="buckets"):
        Slice.from_dict(written)

"""What all replicas and gateways counted since they were last sampled, whatever happened to them."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from headway_operator.samples import Targets
from headway_operator.slo.baselines import GATEWAY_TOTALS, REPLICA_TOTALS, Baseline
from headway_operator.slo.growth import NO_COLUMNS, Columns, grown

TARGETS, OTHERS = Targets(300.0, 40.0), Targets(500.0, 40.0)
NUM_BUCKETS = 106
MET, REJECTED, MISSED, COUNT, TPOT_MET, RECEIVED = map(
    REPLICA_TOTALS.index, ("ttft_met", "rejected", "ttft_missed", "ttft_count", "tpot_met", "received")
)


def baseline(
    totals: Mapping[int, float] | None = None,
    ttft: Mapping[int, int] | None = None,
    *,
    instance: str = "a-1",
    targets: Targets = TARGETS,
    has_histograms: bool = True,
) -> Baseline:
    """A replica's, with these totals and counts of TTFT by their places."""
    known = {COUNT: sum((ttft or {}).values()), **(totals or {})}
    row = tuple(known.get(place, 0) for place in range(len(REPLICA_TOTALS)))
    counts = tuple((ttft or {}).get(bucket, 0) for bucket in range(NUM_BUCKETS))
    return Baseline(instance, row, targets, (counts, (), ()) if has_histograms else ((), (), ()))


def test_counts_of_all_are_added_up_by_bucket() -> None:
    pairs = [
        (baseline(ttft={3: 2}), baseline(ttft={3: 5, 4: 1})),
        (baseline(ttft={3: 2}), baseline(ttft={3: 2})),
        (None, baseline(ttft={7: 1}, instance="c-1")),
    ]
    counts = grown(pairs, TARGETS, NO_COLUMNS).counts
    assert counts["ttft"] == {3: 3, 4: 1, 7: 1}
    assert grown([], TARGETS, NO_COLUMNS) == ({}, {"ttft": {}, "tpot": {}, "e2e": {}}, NO_COLUMNS, [])


def test_who_tells_less_than_before_tells_nothing_and_hides_nobody_elses() -> None:
    pairs = [
        (baseline({MET: 50}, {3: 8, 5: 7}), baseline({MET: 4}, {3: 1})),
        (baseline({MET: 100}, {3: 4}), baseline({MET: 900}, {3: 9, 5: 90})),
    ]
    totals, counts, _, fallen = grown(pairs, TARGETS, NO_COLUMNS)
    assert totals == {"ttft_met": 800}
    assert counts["ttft"] == {3: 5, 5: 90}
    assert fallen == [pairs[0][1]]


def test_totals_that_fell_are_not_hidden_by_what_others_added() -> None:
    pairs = [(baseline({MET: 50}), baseline({MET: 4})), (baseline({MET: 100}), baseline({MET: 900}))]
    assert grown(pairs, TARGETS, NO_COLUMNS).totals == {"ttft_met": 800}


def test_counts_of_a_latency_that_fell_take_nothing_else_with_them() -> None:
    pairs = [(baseline({MET: 5}, {3: 2, 7: 7}), baseline({MET: 6}, {3: 1, 7: 9}))]
    totals, counts, _, fallen = grown(pairs, TARGETS, NO_COLUMNS)
    assert totals == {"ttft_met": 1}
    assert counts["ttft"] == {}
    assert fallen == []


def test_new_targets_restart_what_is_judged_and_nothing_else() -> None:
    """Of a replica that has served a million requests, and two by the new targets."""
    before = baseline({MET: 900_000, TPOT_MET: 900_000, RECEIVED: 1_000_000}, {3: 1_000_000}, targets=OTHERS)
    now = baseline({MET: 2, TPOT_MET: 1, RECEIVED: 1_000_005}, {3: 1_000_004})
    totals, counts, _, fallen = grown([(before, now)], TARGETS, NO_COLUMNS)
    assert totals == {"ttft_met": 2, "tpot_met": 1, "received": 5}
    assert counts["ttft"] == {3: 4}
    assert fallen == []


def test_a_gateway_that_tells_less_than_before_tells_nothing() -> None:
    before, now = Baseline("g", (0.0, 1_000_000.0)), Baseline("g", (0.0, 999_950.0))
    totals, _, _, fallen = grown([(before, now)], TARGETS, NO_COLUMNS)
    assert (totals, fallen) == ({}, [now])
    assert grown([(before, now._replace(instance="h"))], TARGETS, NO_COLUMNS).totals == {
        "gateway_received": 999_950.0
    }


def test_what_was_judged_by_other_targets_does_not_count_and_new_targets_begin_anew() -> None:
    other = baseline({MET: 70}, targets=OTHERS)
    pairs = [
        (baseline({MET: 50}), baseline({MET: 53})),
        (other, baseline({MET: 75}, targets=OTHERS)),
        (other, baseline({MET: 2})),
    ]
    assert grown(pairs, TARGETS, NO_COLUMNS)[0] == {"ttft_met": 5}


def test_whom_a_replica_turned_away_it_did_not_miss() -> None:
    before, now = baseline({MISSED: 4, REJECTED: 1}), baseline({MISSED: 9, REJECTED: 4})
    assert grown([(before, now)], TARGETS, NO_COLUMNS)[0] == {"ttft_missed": 2, "rejected": 3}


def test_counts_whose_beginning_is_not_known_tell_nothing() -> None:
    unknown = (baseline(has_histograms=False), baseline(ttft={3: 9}))
    known = (baseline(ttft={3: 2}), baseline(ttft={3: 7}))
    assert grown([unknown], TARGETS, NO_COLUMNS)[1]["ttft"] == {}
    assert grown([unknown, known], TARGETS, NO_COLUMNS)[1]["ttft"] == {3: 5}


def test_of_other_replicas_than_in_the_pass_before_sums_are_made_anew() -> None:
    """As many as before, which have counted less: the old sums would not even be negative."""
    first = [baseline({MET: 10 * times}, {3: 10 * times}, instance=f"a-{times}") for times in (1, 2, 3)]
    then = [
        baseline({MET: 10 * times + 1}, {3: 10 * times + 1}, instance=f"a-{times}") for times in (1, 2, 3)
    ]
    known = grown([(first[0], first[0]), (first[1], first[1])], TARGETS, NO_COLUMNS).columns
    totals, counts, *_ = grown([(first[1], then[1]), (first[2], then[2])], TARGETS, known)
    assert totals == {"ttft_met": 2}
    assert counts["ttft"] == {3: 2}


def test_gateways_are_added_up_beside_replicas() -> None:
    gateway = [Baseline("g", tuple(3.0 * times for _ in GATEWAY_TOTALS)) for times in (1, 2)]
    totals, *_ = grown([(gateway[0], gateway[1]), (None, baseline({MET: 2}))], TARGETS, NO_COLUMNS)
    assert totals == {"ttft_met": 2, **dict.fromkeys(GATEWAY_TOTALS, 3.0)}


@pytest.mark.parametrize("seed", range(8))
def test_over_many_passes_with_restarts_nothing_is_lost_or_counted_twice(seed: int) -> None:
    draw = random.Random(seed)
    known: Columns = NO_COLUMNS
    before: dict[str, Baseline] = {}
    state: dict[str, tuple[str, Counter[int], Counter[int]]] = {}
    for number in range(40):
        if draw.random() < 0.3:
            state[f"r{number}"] = (f"i{number}", Counter(), Counter())
        if state and draw.random() < 0.2:
            del state[draw.choice(sorted(state))]
        if state and draw.random() < 0.2:
            name = draw.choice(sorted(state))
            state[name] = (f"again{number}", Counter(), Counter())
        happened, latencies = Counter[str](), Counter[int]()
        now: dict[str, Baseline] = {}
        for name, (instance, totals, ttft) in state.items():
            for _ in range(draw.randrange(6)):
                place, bucket = draw.choice((MET, MISSED)), draw.randrange(NUM_BUCKETS)
                totals[place] += 1
                ttft[bucket] += 1
                happened[REPLICA_TOTALS[place]] += 1
                latencies[bucket] += 1
            now[name] = baseline(totals, ttft, instance=instance)
        found, counts, known, _ = grown(
            [(before.get(name), one) for name, one in now.items()], TARGETS, known
        )
        assert found == happened
        assert counts["ttft"] == latencies
        before = now


def test_counts_in_buckets_that_were_empty_before_are_found() -> None:
    """Sums look first at the buckets that had something in the pass before."""
    first = [baseline(ttft={10: 4, 20: 4}, instance=name) for name in "ab"]
    then = [baseline(ttft={10: 5, 20: 5}, instance=name) for name in "ab"]
    later = [
        baseline(ttft={3: 2, 10: 5, 20: 5}, instance="a"),
        baseline(ttft={10: 6, 20: 5, 90: 7}, instance="b"),
    ]
    known, found = NO_COLUMNS, []
    for before, now in ((first, first), (first, then), (then, later)):
        _, counts, known, _ = grown([*zip(before, now, strict=True)], TARGETS, known)
        found.append(counts["ttft"])
    assert found == [{}, {10: 2, 20: 2}, {3: 2, 10: 1, 90: 7}]


def test_a_latency_that_is_no_longer_told_takes_nothing_else_with_it() -> None:
    """Whole answers are counted while they are promised; the rest goes on as it was."""
    before, now = baseline({MET: 800}, {3: 9}), baseline({MET: 804}, {})
    assert grown([(before, now)], TARGETS, NO_COLUMNS)[0] == {"ttft_met": 4}


def test_sums_are_those_of_single_requests_whichever_buckets_they_fall_in() -> None:
    """Mostly in few, so that what is looked at first is mostly all."""
    rng = random.Random(1)
    counted = [[0] * NUM_BUCKETS for _ in range(5)]
    before, known = [baseline(instance=str(index)) for index in range(5)], NO_COLUMNS
    for _ in range(200):
        want: dict[int, int] = {}
        for one in counted:
            for _ in range(rng.randint(0, 5)):
                bucket = rng.choice([30, 31, 32, 33, rng.randrange(NUM_BUCKETS)])
                one[bucket] += 1
                want[bucket] = want.get(bucket, 0) + 1
        now = [baseline(ttft=dict(enumerate(one)), instance=str(index)) for index, one in enumerate(counted)]
        _, counts, known, _ = grown([*zip(before, now, strict=True)], TARGETS, known)
        assert counts["ttft"] == want
        before = now

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
MET, REJECTED, MISSED = (REPLICA_TOTALS.index(name) for name in ("ttft_met", "rejected", "ttft_missed"))


def baseline(
    totals: Mapping[int, float] | None = None,
    ttft: Mapping[int, int] | None = None,
    *,
    instance: str = "a-1",
    targets: Targets = TARGETS,
    has_histograms: bool = True,
) -> Baseline:
    """A replica's, with these totals and counts of TTFT by their places."""
    row = tuple((totals or {}).get(place, 0) for place in range(len(REPLICA_TOTALS)))
    counts = tuple((ttft or {}).get(bucket, 0) for bucket in range(NUM_BUCKETS))
    return Baseline(instance, row, targets, (counts, (), ()) if has_histograms else ((), (), ()))


def test_counts_of_all_are_added_up_by_bucket() -> None:
    pairs = [
        (baseline(ttft={3: 2}), baseline(ttft={3: 5, 4: 1})),
        (baseline(ttft={3: 2}), baseline(ttft={3: 2})),
        (None, baseline(ttft={7: 1}, instance="c-1")),
    ]
    _, counts, _ = grown(pairs, TARGETS, NO_COLUMNS)
    assert counts["ttft"] == {3: 3, 4: 1, 7: 1}
    assert grown([], TARGETS, NO_COLUMNS) == ({}, {"ttft": {}, "tpot": {}, "e2e": {}}, NO_COLUMNS)


def test_a_replica_that_counts_anew_without_saying_so_hides_nobody_elses() -> None:
    pairs = [
        (baseline({MET: 50}, {3: 8, 5: 7}), baseline({MET: 4}, {3: 1})),
        (baseline({MET: 100}, {3: 4}), baseline({MET: 900}, {3: 9, 5: 90})),
    ]
    totals, counts, _ = grown(pairs, TARGETS, NO_COLUMNS)
    assert totals == {"ttft_met": 804}
    assert counts["ttft"] == {3: 6, 5: 90}


def test_totals_that_fell_are_not_hidden_by_what_others_added() -> None:
    pairs = [(baseline({MET: 50}), baseline({MET: 4})), (baseline({MET: 100}), baseline({MET: 900}))]
    assert grown(pairs, TARGETS, NO_COLUMNS)[0] == {"ttft_met": 804}


def test_only_the_counts_of_one_latency_may_go_back() -> None:
    pairs = [(baseline({MET: 5}, {3: 2, 7: 7}), baseline({MET: 6}, {3: 1, 7: 9}))]
    totals, counts, _ = grown(pairs, TARGETS, NO_COLUMNS)
    assert totals == {"ttft_met": 1}
    assert counts["ttft"] == {3: 1, 7: 9}


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
    _, _, known = grown([(first[0], first[0]), (first[1], first[1])], TARGETS, NO_COLUMNS)
    totals, counts, _ = grown([(first[1], then[1]), (first[2], then[2])], TARGETS, known)
    assert totals == {"ttft_met": 2}
    assert counts["ttft"] == {3: 2}


def test_gateways_are_added_up_beside_replicas() -> None:
    gateway = [Baseline("g", tuple(3.0 * times for _ in GATEWAY_TOTALS)) for times in (1, 2)]
    totals, _, _ = grown([(gateway[0], gateway[1]), (None, baseline({MET: 2}))], TARGETS, NO_COLUMNS)
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
        found, counts, known = grown([(before.get(name), one) for name, one in now.items()], TARGETS, known)
        assert found == happened
        assert counts["ttft"] == latencies
        before = now

"""A queue that stands although replicas are thought to be enough: when it does, what it adds and costs."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.law_fleet import BEST, CAPACITY, NOW, Fleet

from headway_operator.slo import Memory
from headway_operator.slo.baselines import Baseline, of_replica
from headway_operator.slo.marks import with_mark


@pytest.fixture
def standing(fleet: Fleet) -> Fleet:
    """Four replicas that are thought to do 24 requests a second, do the 20 that come, and have had ten that
    were late for half a minute; a tenth of the requests misses TTFT."""
    fleet.counted = 100
    fleet.gauges |= {"running": BEST.max_num_seqs}
    fleet.own["r0"] = {"waiting": 10, "oldest_waiting_seconds": 30.0}
    fleet.totals |= {"ttft_met": 5400, "ttft_missed": 600}
    fleet.memory = fleet.memory._replace(late_since=NOW - 30.0, kappa_at=NOW - 5.0)
    return fleet


@pytest.mark.parametrize(("waiting", "want"), [(10, 5), (300, 6)])
def test_it_adds_replicas_that_drain_it_and_costs_trust(standing: Fleet, waiting: int, want: int) -> None:
    standing.own["r0"]["waiting"] = waiting
    decision, memory = standing.decide()
    assert (decision.cause, decision.replicas) == ("AddedReplicas", want)
    assert "a queue that stands" in decision.message
    assert 4 * decision.evidence["trusted_per_second"] > 20.0
    assert memory.kappa == pytest.approx(0.9)


def test_a_queue_at_a_sick_replica_adds_none(standing: Fleet) -> None:
    """Of six with room it alone misses: more replicas do not mend it."""
    standing.replicas |= {name: standing.build.replica(name) for name in ("r4", "r5")}
    standing.gauges |= {"running": 10, "counters": {"ttft_met": 1000, "tpot_met": 1000}}
    ill = {"running": BEST.max_num_seqs, "counters": {"ttft_met": 10, "ttft_missed": 300, "tpot_met": 500}}
    standing.own["r0"] |= ill

    def counted(name: str, at: float, **told: Any) -> Baseline:
        return of_replica(standing.build.sample(at, targets=standing.target.targets, **told))

    marks = with_mark((), {name: counted(name, NOW - 90.0) for name in standing.replicas}, NOW - 90.0)
    before = {
        name: counted(name, NOW - 5.0, **{**standing.gauges, **standing.own.get(name, {})})
        for name in standing.replicas
    }
    standing.memory = standing.memory._replace(replicas=6, marks=marks, baselines=before)
    decision, memory = standing.decide()
    assert decision.sick.startswith("r0 in ")
    assert (decision.replicas, memory.kappa) == (6, 1.0)


def test_a_large_fleet_with_a_queue_at_one_replica_gets_one_more(standing: Fleet) -> None:
    larger = {f"r{number}": standing.build.replica(f"r{number}") for number in range(24)}
    standing.replicas, standing.memory = larger, standing.memory._replace(replicas=24)
    standing.per_second, standing.counted = 24 * 5.0, 600
    assert standing.decide()[0].replicas == 25


@pytest.mark.parametrize(
    "case",
    [
        "it has not lasted",
        "one is on its way",
        "the last one joined moments ago",
        "most of it goes in time",
        "the promise is kept",
        "nobody looked",
        "of so few requests there is no telling",
        "one gives no sample",
        "the limits have just changed",
        "the limit leaves places unused",
    ],
)
def test_it_adds_none_and_costs_no_trust_where(standing: Fleet, case: str) -> None:
    match case:
        case "it has not lasted":
            standing.memory = standing.memory._replace(late_since=NOW - 19.0)
        case "one is on its way":
            standing.pending(1)
        case "the last one joined moments ago":
            standing.replicas["r0"] = replace(standing.replicas["r0"], ready_at=NOW - 10.0)
        case "most of it goes in time":
            standing.counted = 101
            standing.own["r0"]["waiting"] = 20
        case "the promise is kept":
            standing.totals |= {"ttft_met": 5990, "ttft_missed": 10}
        case "nobody looked":
            standing.memory = standing.memory._replace(kappa_at=NOW - 90.0)
        case "of so few requests there is no telling":
            standing.counted = 3
        case "one gives no sample":
            standing.lost = {"r3"}
        case "the limits have just changed":
            standing.memory = standing.memory._replace(limits_changed_at=NOW - 4.0)
        case "the limit leaves places unused":
            few = replace(BEST, max_num_seqs=20)
            standing.gauges |= {"limits": few, "running": 20}
            standing.memory = standing.memory._replace(limits=few)
    decision, memory = standing.decide()
    assert decision.replicas == len(standing.replicas)
    assert memory.kappa >= 1.0


def test_more_than_they_are_thought_to_do_is_met_by_what_they_are_thought_to_do(standing: Fleet) -> None:
    standing.per_second = 4.5 * CAPACITY
    decision, memory = standing.decide()
    assert decision.replicas == 5
    assert memory.kappa == 1.0


def test_since_when_requests_are_late_is_known_over_a_checkpoint(standing: Fleet) -> None:
    memory = standing.decide()[1]
    assert memory.late_since == NOW - 30.0
    assert Memory.from_dict(memory.to_dict(), NOW).late_since == NOW - 30.0
    older: dict[str, Any] = memory.to_dict()
    del older["late_since"]
    assert Memory.from_dict(older, NOW).late_since is None


@pytest.mark.parametrize("which", ["one is asked for", "another is ready"])
def test_with_another_replica_lateness_begins_anew(standing: Fleet, which: str) -> None:
    if which == "one is asked for":
        standing.pending(1)
        assert standing.decide()[1].late_since is None
    else:
        standing.replicas["r0"] = replace(standing.replicas["r0"], ready_at=NOW - 4.0)
        assert standing.decide()[1].late_since == NOW - 4.0

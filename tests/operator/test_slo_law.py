"""The law with a model of steps: every row of the table of symptoms, and what it learns and advises."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
from tests.operator.law_fleet import BEST, CAPACITY, NOW, Fleet

from headway_operator.samples import Limits, Targets
from headway_operator.slo import Memory
from headway_operator.slo.baselines import of_replica
from headway_operator.slo.build import Build
from headway_operator.slo.marks import with_mark
from headway_operator.slo.predictions import Factors
from headway_operator.slo.step_fit import StepFit, StepModel


def test_a_load_that_is_served_changes_nothing_and_says_its_numbers(fleet: Fleet) -> None:
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (4, BEST, "Steady")
    numbers = decision.evidence
    assert numbers["capacity_per_second"] == pytest.approx(CAPACITY, rel=0.02)
    assert numbers["step_base_milliseconds"] == 8.3
    assert numbers["requests_per_second"] == pytest.approx(20.0)
    assert "requests/s expected" in decision.message


@pytest.mark.parametrize(
    ("told", "seen", "share_of_steps", "want"),
    [
        pytest.param(10.0, 11.9, 1.0, 1.0, id="as requests differ"),
        pytest.param(10.0, 13.4, 1.0, 1.16, id="somewhat slower"),
        pytest.param(10.0, 20.0, 1.0, 2.0, id="twice as slow"),
        pytest.param(10.0, 5.0, 1.0, 0.5, id="twice as fast"),
        pytest.param(10.0, 5.0, 0.4, 1.0, id="guesses made most tokens"),
        pytest.param(0.0, 5.0, 0.0, 1.0, id="nothing told"),
    ],
)
def test_what_requests_see_of_steps_puts_right_what_is_told(
    fleet: Fleet, told: float, seen: float, share_of_steps: float, want: float
) -> None:
    """Where too few requests were counted to say what each of them saw; for that see `test_slo_pace`."""
    num_tokens = 20_000.0
    fleet.counted = 0
    fleet.totals |= {
        "generated_tokens": num_tokens,
        "told_count": share_of_steps * num_tokens,
        "told_milliseconds": told * share_of_steps * num_tokens,
        "gaps": num_tokens,
        "gap_milliseconds": num_tokens * seen,
    }
    numbers = fleet.decide()[0].evidence
    assert numbers["step_pace"] == pytest.approx(want, rel=0.01)
    assert numbers["step_base_milliseconds"] == pytest.approx(8.3 * want, rel=0.01)


def test_a_queue_at_a_low_cap_jumps_to_the_models_best_limits(fleet: Fleet) -> None:
    fleet.violated("ttft")
    fleet.gauges |= {"limits": Limits(2, 256), "running": 2, "waiting": 20, "oldest_waiting_seconds": 3.0}
    fleet.memory = fleet.memory._replace(limits=Limits(2, 256))
    decision, memory = fleet.decide()
    assert (decision.limits, decision.cause) == (BEST, "RaisedBatchLimit")
    assert (
        "max_num_seqs 2 -> 33, max_num_batched_tokens 256 -> 2048; the step model's best" in decision.message
    )
    assert memory.limits_changed_at == NOW


def test_a_demand_beyond_capacity_adds_replicas_with_the_limits(fleet: Fleet) -> None:
    fleet.violated("ttft")
    fleet.per_second = 6.5 * CAPACITY
    fleet.memory = fleet.memory._replace(limits=Limits(2, 256))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (7, BEST, "AddedReplicas")


@pytest.mark.parametrize("sign", ["full", "preempting"])
def test_memory_that_is_short_never_raises_the_cap(fleet: Fleet, sign: str) -> None:
    fleet.violated("ttft")
    fleet.memory = fleet.memory._replace(limits=Limits(8, 2048))
    fleet.gauges |= {"limits": Limits(8, 2048), "running": 8}
    if sign == "full":
        fleet.gauges["kv_blocks_used"] = 900
    else:
        fleet.now_totals["preemptions"] = 3
    assert fleet.decide()[0].limits.max_num_seqs <= 8


@pytest.mark.parametrize(
    ("milliseconds", "per_second"),
    [
        pytest.param(50.0, 20.0, id="a mean prompt misses it"),
        pytest.param(100.0, 2.0, id="replicas that are nearly idle miss it"),
    ],
)
def test_a_target_that_prefill_alone_misses_is_infeasible_and_says_what_would_help(
    fleet: Fleet, milliseconds: float, per_second: float
) -> None:
    fleet.violated("ttft")
    fleet.promise(Targets(milliseconds, 26.0))
    fleet.per_second = per_second
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (4, "TargetInfeasible")
    assert "prefill alone takes" in decision.message
    assert "so more replicas would not help: no lever of the model is known to help" in decision.message


def test_a_target_that_nothing_keeps_is_no_reason_to_leave_places_unused(fleet: Fleet) -> None:
    """A queue behind two places, on replicas whose tokens have time left."""
    fleet.violated("ttft")
    fleet.promise(Targets(50.0, 260.0))
    fleet.per_second = 20.0
    few = Limits(2, 2048)
    fleet.memory = fleet.memory._replace(limits=few)
    fleet.gauges = {"limits": few, "running": 2, "waiting": 6, "oldest_waiting_seconds": 4.0}
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (4, "TargetInfeasible")
    assert (decision.cause, decision.limits.max_num_seqs) == ("RaisedBatchLimit", 8)
    fleet.gauges = {"limits": few, "running": 2}
    assert fleet.decide()[0].limits == few, "nobody waits for a place"


def test_busy_replicas_do_not_show_that_an_idle_one_would_miss(fleet: Fleet) -> None:
    """How prompts are spread is not known: their longest may be shorter than a lognormal's."""
    fleet.violated("ttft")
    fleet.promise(Targets(100.0, 26.0))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.advice) == (8, "")


def test_what_was_measured_under_load_is_no_less_than_what_an_idle_replica_takes(fleet: Fleet) -> None:
    fleet.violated("ttft")
    fleet.promise(Targets(50.0, 26.0))
    fleet.ttft_bucket = 20
    decision, _ = fleet.decide()
    assert decision.blocker != "TargetInfeasible"


def test_prompts_less_spread_than_they_are_taken_for_are_known_by_the_factor(fleet: Fleet) -> None:
    fleet.violated("ttft")
    fleet.promise(Targets(100.0, 26.0))
    fleet.per_second = 2.0
    fleet.memory = fleet.memory._replace(factors=Factors(ttft=0.4))
    assert fleet.decide()[0].blocker != "TargetInfeasible"


@pytest.mark.parametrize("misses_alone", ["one", "all"])
def test_a_sick_replica_costs_neither_trust_nor_limits_nor_replicas(fleet: Fleet, misses_alone: str) -> None:
    fleet.violated("ttft")
    fleet.per_second = 8.0
    zero = of_replica(fleet.build.sample(NOW, targets=fleet.target.targets))
    fleet.memory = fleet.memory._replace(
        marks=with_mark((), dict.fromkeys(fleet.replicas, zero), NOW - 90),
        limits_changed_at=NOW - 120,
    )
    for name in fleet.replicas:
        is_bad = misses_alone == "all" or name == "r0"
        fleet.own[name] = {"counters": {"ttft_met": 5, "ttft_missed": 40} if is_bad else {"ttft_met": 200}}
    decision, memory = fleet.decide()
    assert decision.replicas == 4
    if misses_alone == "one":
        assert (decision.limits, decision.blocker) == (BEST, "SickReplica")
        assert decision.sick.startswith("r0 in 40 of 45 requests")
        assert (memory.kappa, memory.trims, memory.factors) == (1.0, (1.0, 1.0), Factors())
    else:
        assert not decision.sick
        assert memory.kappa < 1.0


def test_advice_is_about_what_replicas_are(fleet: Fleet) -> None:
    fleet.violated("ttft")
    gpu = Build(quantization="none", tensor_parallel_size=2, has_gpu=True)
    fleet.promise(Targets(50.0, 26.0))
    fleet.target = replace(fleet.target, build=gpu)
    decision, _ = fleet.decide()
    assert "fp8 weights or tensorParallelSize 4 would be predicted at" in decision.advice


def test_a_target_that_one_sequence_misses_is_infeasible_before_anybody_misses_it(fleet: Fleet) -> None:
    fleet.per_second = 40.0
    fleet.totals = {"ttft_met": 4000}
    fleet.promise(Targets(700.0, 8.0))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (4, "TargetInfeasible")
    assert "a step with one sequence takes 9 ms at idle against a target of 8 ms" in decision.message


def test_latencies_measured_worse_than_predicted_are_believed(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(factors=Factors(ttft=2.0, tpot=1.4))
    assert fleet.decide()[0].replicas > 4


def test_each_promise_has_what_the_other_leaves_of_the_misses(fleet: Fleet) -> None:
    def capacity(ttft_missed: int, tpot_missed: int) -> float:
        fleet.totals = {
            "ttft_met": 6000 - ttft_missed,
            "ttft_missed": ttft_missed,
            "tpot_met": 6000 - tpot_missed,
            "tpot_missed": tpot_missed,
        }
        return fleet.decide()[0].evidence["capacity_per_second"]

    neither, both = capacity(0, 0), capacity(120, 120)
    fleet.totals = {}
    unknown = fleet.decide()[0].evidence["capacity_per_second"]
    assert both < unknown < neither
    assert capacity(0, 120) == neither, "nothing is missed of TTFT, so TPOT may be missed by all that may be"


def learnt(build: Any, *, counted: int = 10, passed: float | None = None, known: float = 0.0) -> float:
    """How far one pass moves the factor of TPOT towards what is measured, as a share of the way."""

    def moved(counted: int, passed: float | None, known: float) -> float:
        fleet = Fleet(build, 4, 4 * CAPACITY)
        fleet.counted = counted
        factors_at = None if passed is None else NOW - passed
        fleet.memory = fleet.memory._replace(factors=Factors(num_tpot=known), factors_at=factors_at)
        return log(fleet.decide()[1].factors.tpot)

    return moved(counted, passed, known) / moved(100_000, None, 0.0)


def test_nothing_is_measured_while_a_gateway_is_silent(build: Any) -> None:
    """What it was asked for is missing from the rate, so that replicas would seem slow."""
    fleet = Fleet(build, 4, 4 * CAPACITY)
    fleet.gateway_lost = True
    assert fleet.decide()[1].factors == Factors()
    fleet.gateway_lost = False
    assert fleet.decide()[1].factors != Factors()


def test_the_first_measurement_counts_nearly_whole(build: Any) -> None:
    assert learnt(build) > 0.9
    assert 0.2 < learnt(build, passed=5.0) < 0.9, "of the little that has come since the last pass"


def test_later_ones_count_by_the_requests_beyond_the_percentile(build: Any) -> None:
    few, many = (learnt(build, counted=number, passed=5.0, known=20.0) for number in (10, 20))
    assert many == pytest.approx(2.0 * few, rel=0.1)
    assert few < 0.05


def test_a_pass_counts_by_the_time_since_the_last_one(build: Any) -> None:
    for counted, known in ((10, 20.0), (100_000, 1e9)):
        short, whole = (learnt(build, counted=counted, passed=passed, known=known) for passed in (2.5, 5.0))
        assert whole == pytest.approx(2.0 * short, rel=0.1)


def test_what_many_passes_said_is_not_forgotten_for_one(build: Any) -> None:
    """Nor if one comes early: it says little, and makes nothing forgotten."""
    fleet = Fleet(build, 4, 4 * CAPACITY)
    fleet.counted = 10_000
    for passed in (*(5.0,) * 40, 0.2, 0.0):
        fleet.memory = fleet.memory._replace(factors_at=NOW - passed)
        fleet.memory = fleet.memory._replace(factors=fleet.decide()[1].factors)
    known = fleet.memory.factors.num_tpot
    assert known > 20.0
    assert learnt(build, counted=10_000, passed=5.0, known=known) == pytest.approx(0.05, rel=0.05)


def test_what_was_measured_far_from_what_a_replica_can_do_is_learnt_slowly(build: Any) -> None:
    fleet = Fleet(build, 4, 0.3 * 4 * CAPACITY)
    seen = []
    for passed in (5.0, 5.0, None):
        fleet.memory = fleet.memory._replace(factors_at=None if passed is None else NOW - passed)
        _, memory = fleet.decide()
        fleet.memory = fleet.memory._replace(factors=memory.factors)
        seen.append(abs(log(memory.factors.tpot)))
    first, second, whole = seen
    assert 0.0 < first < 0.1 * whole
    assert second == pytest.approx(2.0 * first, rel=0.1)
    assert memory.factors.num_tpot == 0.0


def test_a_decision_does_not_depend_on_what_the_clock_says_besides_its_argument(fleet: Fleet) -> None:
    assert fleet.decide() == fleet.decide()


def test_what_was_learnt_survives_a_checkpoint(fleet: Fleet) -> None:
    _, memory = fleet.decide()
    forgotten = memory._replace(watched_since=None, idle_since=None, marks=())
    assert Memory.from_dict(memory.to_dict(), NOW) == forgotten


def test_a_model_of_short_contexts_is_not_asked_about_long_ones(fleet: Fleet) -> None:
    """Of sequences that all attend to some 24 tokens it cannot tell whose time it is."""

    def capacity(context: float) -> float:
        decoded = (4000.0, 0.0, 4000.0, 4000.0 * context, *(0.0,) * 11)
        fit = StepFit({"d1": decoded}, StepModel(base=1.6, prefill=0.05, sequence=0.0, kv=0.14))
        fleet.memory = fleet.memory._replace(fit=fit)
        return fleet.decide()[0].evidence["capacity_per_second"]

    # The load attends to 1,200: it would take 168 ms a sequence.
    assert capacity(24.0) > 5 * capacity(1200.0) > 0.0


def test_a_target_that_guesses_keep_is_feasible(fleet: Fleet) -> None:
    """Steps that check guesses tell the model nothing: a plain one takes 9 ms, and a token came in 6."""
    fleet.per_second = 40.0
    fleet.promise(Targets(700.0, 8.0))
    fleet.tpot_bucket = 16
    cases: list[tuple[float, dict[str, float]]] = [
        (0.6, {"ttft_met": 4000}),
        (1.0, {"ttft_met": 4000, "tpot_met": 4000}),
    ]
    for factor, totals in cases:
        fleet.totals = totals
        fleet.memory = fleet.memory._replace(factors=Factors(tpot=factor))
        decision, memory = fleet.decide()
        assert not decision.advice
        assert decision.replicas > 4
        assert decision.evidence["best_max_num_seqs"] >= 4, "for plain steps it would be one"
        assert memory.factors.tpot < 0.75


def test_of_plain_steps_the_factor_is_learnt_from_what_was_predicted(fleet: Fleet) -> None:
    """Where little runs, tokens come hardly later than a plain step beside nothing else ends: no guess."""
    fleet.tpot_bucket = 19
    fleet.memory = fleet.memory._replace(factors=Factors(tpot=1.3), factors_at=NOW)
    assert fleet.decide()[1].factors.tpot == 1.3

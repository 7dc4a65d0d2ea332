"""The law with a model of steps: every row of the table of symptoms, and what it learns and advises."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
from tests.operator.law_fleet import BEST, CAPACITY, MODEL, NOW, Fleet

from headway_operator.samples import Limits, Targets
from headway_operator.slo import Memory
from headway_operator.slo.baselines import of_replica
from headway_operator.slo.build import Build
from headway_operator.slo.capacity import Factors
from headway_operator.slo.marks import with_mark
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
    num_tokens = 20_000.0
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
    fleet.memory = replace(fleet.memory, limits=Limits(2, 256))
    decision, memory = fleet.decide()
    assert (decision.limits, decision.cause) == (BEST, "RaisedBatchLimit")
    assert (
        "max_num_seqs 2 -> 33, max_num_batched_tokens 256 -> 2048; the step model's best" in decision.message
    )
    assert memory.limits_changed_at == NOW


def test_a_demand_beyond_capacity_adds_replicas_with_the_limits(fleet: Fleet) -> None:
    fleet.violated("ttft")
    fleet.per_second = 6.5 * CAPACITY
    fleet.memory = replace(fleet.memory, limits=Limits(2, 256))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (7, BEST, "AddedReplicas")


@pytest.mark.parametrize("sign", ["full", "preempting"])
def test_memory_that_is_short_never_raises_the_cap(fleet: Fleet, sign: str) -> None:
    fleet.violated("ttft")
    fleet.memory = replace(fleet.memory, limits=Limits(8, 2048))
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
    fleet.memory = replace(fleet.memory, factors=Factors(ttft=0.4))
    assert fleet.decide()[0].blocker != "TargetInfeasible"


@pytest.mark.parametrize("misses_alone", ["one", "all"])
def test_a_sick_replica_costs_neither_trust_nor_limits_nor_replicas(fleet: Fleet, misses_alone: str) -> None:
    fleet.violated("ttft")
    fleet.per_second = 8.0
    zero = of_replica(fleet.build.sample(NOW, targets=fleet.target.targets))
    fleet.memory = replace(
        fleet.memory,
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
    fleet.promise(Targets(700.0, 8.0))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (4, "TargetInfeasible")
    assert "a step with one sequence takes 9 ms at idle against a target of 8 ms" in decision.message


def test_slow_tokens_among_many_prompts_trim_the_budget_and_no_further(fleet: Fleet) -> None:
    """Whatever is missed, for however long: a fifth below the model's best is the end."""
    fleet.violated("tpot")
    fleet.per_second = 8.0
    steps = StepFit(model=replace(MODEL, prefill=0.06, sequence=0.2))
    fleet.memory = replace(fleet.memory, fit=steps, limits=Limits(32, 2048))
    decision, memory = fleet.decide()
    assert (decision.limits, decision.cause) == (Limits(32, 1638), "LoweredTokenBudget")
    assert "trimmed for what is measured" in decision.message
    for _ in range(5):
        fleet.memory = replace(memory, limits_changed_at=NOW - 60, kappa_cut_at=None)
        decision, memory = fleet.decide()
    assert decision.limits.max_num_batched_tokens == 1638


@pytest.mark.parametrize(
    ("running", "least"), [pytest.param(10, 0, id="few run"), pytest.param(25, 30, id="nearly all places")]
)
def test_slow_tokens_of_many_sequences_trim_the_batch_but_make_no_queue(
    fleet: Fleet, running: int, least: int
) -> None:
    fleet.violated("tpot")
    fleet.gauges["running"] = running
    fit = StepFit(model=replace(MODEL, prefill=0.03, sequence=0.3))
    fleet.memory = replace(fleet.memory, fit=fit, limits=Limits(36, 2048))
    decision, _ = fleet.decide()
    assert decision.cause == "LoweredBatchLimit"
    best = decision.evidence["best_max_num_seqs"]
    assert decision.limits == Limits(max(round(0.8 * best), least), 2048)


@pytest.mark.parametrize(
    ("load", "waiting", "is_room_for_all"),
    [
        pytest.param(4.3, 0, True, id="a little too few replicas"),
        pytest.param(4.3, 1, True, id="and one waits at each, too late"),
        pytest.param(4.3, 40, False, id="and so many wait that TPOT would be far off with them inside"),
        pytest.param(6.0, 0, False, id="far too few"),
    ],
)
def test_no_queue_is_made_where_replicas_lack_but_a_little(
    fleet: Fleet, load: float, waiting: int, *, is_room_for_all: bool
) -> None:
    fleet.per_second = load * CAPACITY
    fleet.gauges |= {"waiting": waiting, "oldest_waiting_seconds": 5.0 if waiting else 0.0}
    numbers = fleet.decide()[0].evidence
    fleet.memory = replace(fleet.memory, limits=Limits(20, 2048))
    decision, _ = fleet.decide()
    assert (decision.limits.max_num_seqs > numbers["best_max_num_seqs"]) is is_room_for_all


@pytest.mark.parametrize(
    ("waiting", "oldest_waiting_seconds", "is_full"),
    [
        pytest.param(20, 3.0, True, id="many wait and some are late"),
        pytest.param(20, 0.3, False, id="nobody is late yet"),
        pytest.param(2, 3.0, False, id="a few are late"),
    ],
)
def test_more_load_than_can_be_served_lets_in_only_whom_tpot_is_kept_for(
    fleet: Fleet, waiting: int, oldest_waiting_seconds: float, *, is_full: bool
) -> None:
    fleet.violated("ttft")
    fleet.per_second = 8.0 * CAPACITY
    running = {"running": 33, "waiting": waiting, "oldest_waiting_seconds": oldest_waiting_seconds}
    fleet.gauges |= running
    fleet.memory = replace(fleet.memory, fit=StepFit(model=replace(MODEL, sequence=0.35)))
    numbers = fleet.decide()[0].evidence
    best, full = numbers["best_max_num_seqs"], numbers["full_max_num_seqs"]
    assert full < best
    # From the best, though it is near; and back from far.
    for limit in (int(best), 60):
        fleet.memory = replace(fleet.memory, limits=Limits(limit, 2048))
        decision, _ = fleet.decide()
        assert decision.limits.max_num_seqs == (full if is_full else best)


def test_both_broken_take_the_best_limits_and_replicas_at_once(fleet: Fleet) -> None:
    fleet.violated("ttft", "tpot")
    fleet.per_second = 6.5 * CAPACITY
    fleet.memory = replace(fleet.memory, trims=(0.8, 0.8), limits=Limits(26, 1638))
    decision, memory = fleet.decide()
    assert decision.replicas == 7
    assert decision.limits.max_num_batched_tokens > 1638
    assert min(memory.trims) > 0.8


def test_trims_go_back_while_nothing_is_wrong(fleet: Fleet) -> None:
    fleet.memory = replace(
        fleet.memory, trims=(1.0, 0.8), limits=Limits(33, 1638), limits_changed_at=NOW - 20
    )
    decision, memory = fleet.decide()
    assert memory.trims[0] == 1.0
    assert memory.trims[1] == pytest.approx(0.84)
    assert decision.limits.max_num_batched_tokens == round(2048 * 0.84)


@pytest.mark.parametrize(
    ("running", "waiting", "limit", "want"),
    [
        pytest.param(29, 3, 29, 33, id="all are taken"),
        pytest.param(32, 3, 32, 32, id="all are taken, and there should hardly be more"),
        pytest.param(20, 0, 29, 29, id="some are left"),
        pytest.param(37, 3, 37, 37, id="all are taken, and there should be fewer"),
        pytest.param(29, 3, 33, 33, id="there are as many as there should be"),
    ],
)
def test_a_few_more_places_are_worth_a_change_where_all_are_taken(
    fleet: Fleet, running: int, waiting: int, limit: int, want: int
) -> None:
    fleet.gauges |= {"running": running, "waiting": waiting, "limits": Limits(limit, 2048)}
    fleet.memory = replace(fleet.memory, limits=Limits(limit, 2048))
    decision, _ = fleet.decide()
    assert decision.limits.max_num_seqs == want
    assert decision.cause == ("RaisedBatchLimit" if want > limit else "Steady")


def test_they_are_not_while_tpot_is_missed(fleet: Fleet) -> None:
    fleet.violated("tpot")
    fleet.gauges |= {"running": 29, "waiting": 3, "limits": Limits(29, 2048)}
    fleet.memory = replace(fleet.memory, limits=Limits(29, 2048))
    decision, _ = fleet.decide()
    assert decision.limits.max_num_seqs <= 29


def test_limits_are_looked_at_again_after_fifteen_seconds(fleet: Fleet) -> None:
    fleet.memory = replace(fleet.memory, limits=Limits(8, 256), limits_changed_at=NOW - 14)
    assert fleet.decide()[0].limits == Limits(8, 256)
    fleet.memory = replace(fleet.memory, limits=Limits(8, 256), limits_changed_at=NOW - 15)
    assert fleet.decide()[0].limits == BEST


def test_latencies_measured_worse_than_predicted_are_believed(fleet: Fleet) -> None:
    fleet.memory = replace(fleet.memory, factors=Factors(ttft=1.0, tpot=1.4))
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
        fleet.memory = replace(fleet.memory, factors=Factors(num_tpot=known), factors_at=factors_at)
        return log(fleet.decide()[1].factors.tpot)

    return moved(counted, passed, known) / moved(100_000, None, 0.0)


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
        fleet.memory = replace(fleet.memory, factors_at=NOW - passed)
        fleet.memory = replace(fleet.memory, factors=fleet.decide()[1].factors)
    known = fleet.memory.factors.num_tpot
    assert known > 20.0
    assert learnt(build, counted=10_000, passed=5.0, known=known) == pytest.approx(0.05, rel=0.05)


def test_what_was_measured_far_from_what_a_replica_can_do_is_learnt_slowly(build: Any) -> None:
    fleet = Fleet(build, 4, 0.3 * 4 * CAPACITY)
    seen = []
    for passed in (5.0, 5.0, None):
        fleet.memory = replace(fleet.memory, factors_at=None if passed is None else NOW - passed)
        _, memory = fleet.decide()
        fleet.memory = replace(fleet.memory, factors=memory.factors)
        seen.append(abs(log(memory.factors.tpot)))
    first, second, whole = seen
    assert 0.0 < first < 0.1 * whole
    assert second == pytest.approx(2.0 * first, rel=0.1)
    assert memory.factors.num_tpot == 0.0


def test_a_decision_does_not_depend_on_what_the_clock_says_besides_its_argument(fleet: Fleet) -> None:
    assert fleet.decide() == fleet.decide()


def test_what_was_learnt_survives_a_checkpoint(fleet: Fleet) -> None:
    _, memory = fleet.decide()
    forgotten = replace(memory, watched_since=None, idle_since=None, marks=())
    assert Memory.from_dict(memory.to_dict(), NOW) == forgotten


def test_a_model_of_short_contexts_is_not_asked_about_long_ones(fleet: Fleet) -> None:
    """Of sequences that all attend to some 24 tokens it cannot tell whose time it is."""

    def capacity(context: float) -> float:
        decoded = (4000.0, 0.0, 4000.0, 4000.0 * context, *(0.0,) * 11)
        fit = StepFit({"d1": decoded}, StepModel(base=1.6, prefill=0.05, sequence=0.0, kv=0.14))
        fleet.memory = replace(fleet.memory, fit=fit)
        return fleet.decide()[0].evidence["capacity_per_second"]

    # The load attends to 1,200: it would take 168 ms a sequence.
    assert capacity(24.0) > 5 * capacity(1200.0) > 0.0

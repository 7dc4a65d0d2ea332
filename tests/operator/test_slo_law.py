"""The law with a model of steps: every row of the table of symptoms, and every rule of stability."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.slo import Memory, decide
from headway_operator.slo.baselines import of_replica
from headway_operator.slo.build import Build
from headway_operator.slo.capacity import Factors, Workload
from headway_operator.slo.marks import with_mark
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepFit, StepModel
from headway_operator.state import (
    Decision,
    GatewaySample,
    Limits,
    Observed,
    Replica,
    ReplicaPhase,
    Revision,
    Sample,
    Targets,
)

NOW = 100_000.0
MODEL = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
# What MODEL says for the load below: 25 run on average, and more than 33 at once would miss TPOT.
BEST = Limits(33, 2048)
# Requests per second that one replica keeps both targets with, as MODEL and the load below make it.
CAPACITY = 6.06


class Fleet:
    """Replicas of a known model under a steady load of 1,000 prompt and 200 generated tokens a request."""

    def __init__(self, build: Any, ready: int = 4, per_second: float = 20.0) -> None:
        self.build = build
        self.target = build.target(
            targets=Targets(700.0, 26.0), max_replicas=64, initial=BEST, stabilization_seconds=300.0
        )
        self.per_second = per_second
        self.totals: dict[str, float] = {"ttft_met": 4000, "tpot_met": 4000}
        self.now_totals: dict[str, float] = {}
        self.ttft_bucket = 50
        self.gauges: dict[str, Any] = {"limits": BEST, "running": 10}
        self.waiting = 0
        self.replicas = {f"r{number}": build.replica(f"r{number}") for number in range(ready)}
        self.lost: set[str] = set()
        self.own: dict[str, dict[str, Any]] = {}
        self.gateway_lost = False
        self.other_scaler = ""
        self.memory = Memory(
            began_at=1.0,
            replicas=ready,
            limits=BEST,
            initial=BEST,
            targets=self.target.targets,
            fit=StepFit(model=MODEL),
            workload=Workload(1000.0, 2e6, 200.0, 1200.0, 0.0),
            watched_since=NOW - 5000,
            replicas_raised_at=1.0,
        )

    def promise(self, targets: Targets) -> None:
        """Instead of the one before."""
        self.target = replace(self.target, targets=targets)
        self.memory = replace(self.memory, targets=targets)

    def pending(self, count: int, age: float = 5.0, reason: str = "") -> None:
        phase: ReplicaPhase = "pending"
        for number in range(len(self.replicas), len(self.replicas) + count):
            self.replicas[f"p{number}"] = Replica(
                f"p{number}", "1a2b3c4d", phase, None, created_at=NOW - age, reason=reason
            )
        self.memory = replace(self.memory, replicas=len(self.replicas), replicas_raised_at=NOW - age)

    def violated(self, *names: str) -> None:
        for name in names:
            self.totals |= {f"{name}_met": 100, f"{name}_missed": 300}
            self.now_totals[f"{name}_missed"] = 30

    def slices(self) -> tuple[Slice, ...]:
        """Five minutes in slices of 5 s; the last one holds what happens now as well."""
        count = self.per_second * 5
        requests = {
            "arrived": count,
            "prompts": count,
            "prompt_sum": 1000.0 * count,
            "prompt_squares": 2e6 * count,
            "answers": count,
            "answer_sum": 200.0 * count,
            "decoded": 200.0 * count,
            "attended": 240_000.0 * count,
        }
        judged = {name: value / 60 for name, value in self.totals.items()}
        made = [
            Slice(
                NOW - 5 * k,
                NOW - 5 * (k - 1),
                {**requests, **judged},
                {"tpot": {24: 10}, "ttft": {self.ttft_bucket: 10}},
            )
            for k in range(60, 0, -1)
        ]
        last = made[-1]
        totals = {
            name: last.total(name) + self.now_totals.get(name, 0.0)
            for name in {*last.totals, *self.now_totals}
        }
        return (*made[:-1], last.with_totals(totals))

    def decide(self, now: float = NOW) -> tuple[Decision, Memory]:
        ready = [name for name, one in self.replicas.items() if one.phase == "ready"]
        samples = {
            name: None
            if name in self.lost
            else self.build.sample(now, targets=self.target.targets, **self.gauges, **self.own.get(name, {}))
            for name in ready
        }
        gateway = GatewaySample("g", now, self.waiting, 20.0 if self.waiting else 0.0, 0, {})
        sample = Sample(now, samples, {"g": None if self.gateway_lost else gateway})
        observed = Observed(
            revisions=(Revision("demo-1a2b3c4d", "1a2b3c4d", len(self.replicas), 0.0),),
            replicas=tuple(self.replicas.values()),
            other_scaler=self.other_scaler,
        )
        return decide(self.target, replace(self.memory, slices=self.slices()), sample, observed, now)


@pytest.fixture
def fleet(build: Any) -> Fleet:
    return Fleet(build)


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


# --- the table of symptoms


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


def test_slow_tokens_of_many_sequences_trim_the_batch(fleet: Fleet) -> None:
    fleet.violated("tpot")
    fleet.memory = replace(fleet.memory, fit=StepFit(model=replace(MODEL, prefill=0.03, sequence=0.3)))
    decision, _ = fleet.decide()
    assert decision.cause == "LoweredBatchLimit"
    assert decision.limits.max_num_batched_tokens == 2048


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


def test_limits_are_looked_at_again_after_fifteen_seconds(fleet: Fleet) -> None:
    fleet.memory = replace(fleet.memory, limits=Limits(8, 256), limits_changed_at=NOW - 14)
    assert fleet.decide()[0].limits == Limits(8, 256)
    fleet.memory = replace(fleet.memory, limits=Limits(8, 256), limits_changed_at=NOW - 15)
    assert fleet.decide()[0].limits == BEST


# --- up


@pytest.mark.parametrize(
    ("ready", "per_second", "want"),
    [
        pytest.param(1, 500.0, 5, id="four more where that is more than double"),
        pytest.param(6, 500.0, 12, id="doubled"),
        pytest.param(20, 500.0, 28, id="eight more at most"),
        pytest.param(4, 5.5 * CAPACITY, 6, id="no more than the load needs"),
    ],
)
def test_up_is_at_once_and_bounded(build: Any, ready: int, per_second: float, want: int) -> None:
    decision, _ = Fleet(build, ready, per_second).decide()
    assert (decision.replicas, decision.cause) == (want, "AddedReplicas")


def test_no_promise_has_to_break_before_replicas_are_added(build: Any) -> None:
    decision, _ = Fleet(build, 4, 5.5 * CAPACITY).decide()
    assert decision.ttft.verdict == decision.tpot.verdict == "met"
    assert decision.replicas == 6


def test_what_is_pending_is_counted_and_not_asked_for_twice(fleet: Fleet) -> None:
    fleet.per_second = 5.5 * CAPACITY
    fleet.pending(2)
    decision, _ = fleet.decide()
    assert decision.replicas == 6


def test_pending_replicas_do_not_freeze_what_the_load_needs_beyond_them(fleet: Fleet) -> None:
    fleet.per_second = 8.5 * CAPACITY
    fleet.pending(2)
    decision, _ = fleet.decide()
    assert decision.replicas == 9


@pytest.mark.parametrize(
    ("ages", "reason", "want"),
    [
        pytest.param([700.0, 700.0], "ImagePullBackOff", 8, id="one more for each"),
        pytest.param([1400.0, 1400.0, 700.0, 700.0], "ImagePullBackOff", 8, id="none for a substitute"),
        pytest.param([700.0, 700.0], "Unschedulable", 6, id="none where no place is found"),
    ],
)
def test_a_replica_past_its_deadline_is_no_supply(
    fleet: Fleet, ages: list[float], reason: str, want: int
) -> None:
    fleet.per_second = 5.5 * CAPACITY
    for age in ages:
        fleet.pending(1, age=age, reason=reason)
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (want, reason)


@pytest.mark.parametrize("age", [5.0, 700.0], ids=["at once", "past the deadline"])
def test_replicas_without_a_place_hold_no_removal_back(fleet: Fleet, age: float) -> None:
    fleet.pending(3, age=age, reason="Unschedulable")
    fleet.memory = replace(fleet.memory, recommended=((NOW - 290, 4),))
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.cause) == (4, "RemovedReplica"), "all of them at once"
    fleet.per_second = CAPACITY
    fleet.memory = replace(fleet.memory, recommended=((NOW - 290, 2),))
    assert fleet.decide()[0].replicas == 4, "one that serves has its own turn"


def test_replicas_that_only_start_hold_removals_back(fleet: Fleet) -> None:
    fleet.pending(3)
    fleet.memory = replace(fleet.memory, recommended=((NOW - 290, 4),))
    assert fleet.decide()[0].replicas == 7


def test_a_backlog_asks_for_what_drains_it(fleet: Fleet) -> None:
    fleet.waiting = 900
    decision, _ = fleet.decide()
    # 900 less what is spare while replicas start, within 45 s.
    assert 5 <= decision.replicas <= 8
    assert fleet.decide()[0].replicas > Fleet(fleet.build).decide()[0].replicas


def test_bounds_of_the_spec_hold(fleet: Fleet) -> None:
    fleet.per_second = 40.0
    fleet.target = replace(fleet.target, max_replicas=5)
    assert fleet.decide()[0].replicas == 5


@pytest.mark.parametrize("who", ["HorizontalPodAutoscaler/demo", "ScaledObject/demo"])
def test_there_is_one_writer(fleet: Fleet, who: str) -> None:
    fleet.other_scaler, fleet.per_second = who, 40.0
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (4, "OtherScaler")


# --- trust


def test_a_promise_broken_without_a_reason_takes_a_tenth_of_the_trust(fleet: Fleet) -> None:
    fleet.violated("tpot")
    _, memory = fleet.decide()
    assert memory.kappa == pytest.approx(0.9)
    # And not again on the same evidence.
    fleet.memory = replace(memory, limits_changed_at=NOW - 60)
    assert fleet.decide(NOW)[1].kappa >= 0.9


def test_a_promise_broken_by_too_few_replicas_says_nothing_of_the_model(fleet: Fleet) -> None:
    fleet.violated("tpot", "ttft")
    fleet.per_second = 40.0
    assert fleet.decide()[1].kappa == 1.0


@pytest.mark.parametrize(
    ("met", "missed", "want"),
    [
        pytest.param(4000, 0, 0.808, id="kept"),
        pytest.param(3820, 180, 0.808, id="kept as far as counted"),
        pytest.param(3790, 210, 0.8, id="more missed than allowed, though nothing proves it"),
        pytest.param(40, 0, 0.8, id="too few requests to tell"),
    ],
)
def test_trust_comes_back_by_a_hundredth_a_minute_on_evidence(
    fleet: Fleet, met: int, missed: int, want: float
) -> None:
    fleet.memory = replace(fleet.memory, kappa=0.8, kappa_at=NOW - 60)
    fleet.totals |= {"ttft_met": met, "ttft_missed": missed}
    decision, memory = fleet.decide()
    assert decision.ttft.verdict != "violated"
    assert memory.kappa == pytest.approx(want)


def test_less_trust_is_more_replicas(fleet: Fleet) -> None:
    fleet.memory = replace(fleet.memory, kappa=0.6)
    assert fleet.decide()[0].replicas > 4


# --- down


def quiet(build: Any, recommended: int = 3, ready: int = 6) -> Fleet:
    """Six replicas where three would do."""
    fleet = Fleet(build, ready, 9.0)
    history = tuple((NOW - age, recommended) for age in (250.0, 200.0, 100.0))
    fleet.memory = replace(fleet.memory, recommended=history)
    return fleet


def test_down_is_one_at_a_time_after_the_whole_time_looked_back(build: Any) -> None:
    decision, memory = quiet(build).decide()
    assert (decision.replicas, decision.cause) == (5, "RemovedReplica")
    assert memory.replicas_lowered_at == NOW


def test_a_large_fleet_goes_down_by_a_tenth(build: Any) -> None:
    assert quiet(build, ready=40).decide()[0].replicas == 36


def test_the_highest_recommendation_looked_back_on_holds(build: Any) -> None:
    decision, _ = quiet(build, recommended=6).decide()
    assert (decision.replicas, decision.cause) == (6, "Stabilizing")
    assert "would not have over the last 300 s" in decision.message


def test_nothing_is_removed_at_once_when_a_model_has_been_learnt(build: Any) -> None:
    """What symptoms have just asked for is not taken away by the first word of the model."""
    fleet = quiet(build, recommended=8)
    fleet.memory = replace(fleet.memory, workload=None)
    decision, memory = fleet.decide()
    assert (decision.replicas, decision.cause) == (6, "Stabilizing")
    assert max(number for _, number in memory.recommended) == 6, (
        "and the 8 of the time without one is forgotten"
    )


def test_nothing_is_removed_for_the_window_after_a_restart(build: Any) -> None:
    fleet = quiet(build)
    fleet.memory = replace(Memory.from_dict(fleet.memory.to_dict(), NOW), slices=())
    assert fleet.decide()[0].replicas == 6


@pytest.mark.parametrize("lost", ["replica", "gateway"])
def test_partial_metrics_never_take_a_replica_away(build: Any, lost: str) -> None:
    fleet = quiet(build)
    fleet.lost, fleet.gateway_lost = ({"r1"} if lost == "replica" else set()), lost == "gateway"
    assert fleet.decide()[0].replicas == 6


def test_without_most_samples_everything_holds_but_the_minimum(build: Any) -> None:
    fleet = quiet(build)
    fleet.lost = {"r0", "r1", "r2", "r3"}
    decision, _ = fleet.decide()
    assert (decision.replicas, decision.blocker) == (6, "SamplesMissing")
    fleet.target = replace(fleet.target, min_replicas=8)
    assert fleet.decide()[0].replicas == 8


def test_fewer_are_not_recommended_where_they_would_come_close_to_a_target(build: Any) -> None:
    """Three could keep the promise; the dead band wants them to keep nine tenths of it."""
    recommended = {
        share: Fleet(build, 4, 3 * CAPACITY * share).decide()[0].evidence["recommended_replicas"]
        for share in (0.80, 0.945)
    }
    assert recommended == {0.80: 3, 0.945: 4}
    assert Fleet(build, 3, 3 * CAPACITY * 0.945).decide()[0].replicas == 3


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


@pytest.mark.parametrize(("load", "how"), [(1.0, "at once"), (0.3, "slowly")])
def test_the_first_measurement_counts_whole_near_what_a_replica_can_do(
    build: Any, load: float, how: str
) -> None:
    fleet = Fleet(build, 4, 4 * CAPACITY * load)
    factors = []
    for _ in range(2):
        _, memory = fleet.decide()
        fleet.memory = replace(fleet.memory, factors=memory.factors)
        factors.append(memory.factors.tpot)
    assert factors[0] != 1.0
    assert (factors[1] == pytest.approx(factors[0], rel=1e-3)) is (how == "at once")


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

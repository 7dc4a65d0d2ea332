"""Single decisions: which knob a symptom moves, and what forbids a change."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.slo import Memory, decide
from headway_operator.slo.slices import Slice
from headway_operator.state import (
    Decision,
    GatewaySample,
    Limits,
    Observed,
    ReplicaSample,
    Revision,
    Sample,
    Targets,
)

NOW = 10_000.0


class Scene:
    """One replica (or more) with a past of twenty seconds, changed by each test and decided once."""

    def __init__(self, build: Any) -> None:
        self.build = build
        self.target = build.target(initial=Limits(8, 512))
        self.totals: dict[str, float] = {"ttft_met": 50, "tpot_met": 50}
        self.tpot = {18.0: 50}
        self.past: tuple[Slice, ...] = ()
        self.replicas = {"a": build.replica("a")}
        self.samples: dict[str, ReplicaSample | None] = {"a": build.sample(NOW, limits=Limits(8, 512))}
        self.memory = Memory(
            began_at=1.0,
            replicas=1,
            limits=Limits(8, 512),
            targets=self.target.targets,
            violated_since=NOW - 60,
            violated_at=NOW - 2,
            replicas_raised_at=1.0,
        )
        self.other_scaler = ""
        self.gateways: dict[str, GatewaySample | None] = {}
        self.errors: dict[str, str] = {}
        self.now = NOW

    def sample(self, **changes: Any) -> None:
        self.samples = {name: replace(one, **changes) if one else None for name, one in self.samples.items()}

    def slow_ttft(self) -> None:
        """Full, with a long queue that grows."""
        self.totals |= {"ttft_missed": 30, "queue_milliseconds": 90_000, "queue_count": 30}
        self.sample(running=8, waiting=40, oldest_waiting_seconds=3.0)

    def slow_tpot(self) -> None:
        self.totals |= {"tpot_missed": 30, "prompt_tokens": 100, "generated_tokens": 1000}
        self.tpot = {60.0: 80}
        self.sample(running=8)

    def decide(self) -> tuple[Decision, Memory]:
        histogram = self.build.histogram(self.tpot)
        counts = {i: count for i, count in enumerate(histogram.counts) if count}
        past = Slice(self.now - 9, self.now, self.totals, {"tpot": counts})
        memory = replace(self.memory, slices=(*self.past, past))
        observed = Observed(
            revisions=(Revision("demo-1a2b3c4d", "1a2b3c4d", len(self.replicas), 0.0),),
            replicas=tuple(self.replicas.values()),
            other_scaler=self.other_scaler,
        )
        sample = Sample(self.now, self.samples, self.gateways, self.errors)
        return decide(self.target, memory, sample, observed, self.now)


@pytest.fixture
def scene(build: Any) -> Scene:
    return Scene(build)


def test_a_queue_at_the_cap_with_slack_raises_the_batch_limit(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = replace(scene.memory, violated_since=NOW - 5)
    decision, memory = scene.decide()
    assert decision.limits == Limits(32, 512)
    assert (decision.replicas, decision.cause, decision.blocker) == (1, "RaisedBatchLimit", "")
    assert "max_num_seqs 8 -> 32; TPOT has 5" in decision.message
    assert "with 40 waiting" in decision.message
    assert memory.limits_changed_at == NOW


def test_the_batch_limit_keeps_room_for_one_token_of_each(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = replace(scene.memory, limits=Limits(8, 16))
    assert scene.decide()[0].limits == Limits(32, 32)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"kv_blocks_used": 900}, id="kv memory is nearly used"),
        pytest.param({"limits": Limits(64, 512), "running": 64}, id="limit is at its highest"),
    ],
)
def test_replicas_are_added_where_no_limit_can_help(scene: Scene, change: dict[str, Any]) -> None:
    scene.slow_ttft()
    scene.sample(**change)
    limits = change.get("limits", Limits(8, 512))
    scene.memory = replace(scene.memory, limits=limits)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (2, limits, "AddedReplicas")
    assert "replicas 1 -> 2" in decision.message


def test_preemptions_forbid_a_higher_limit(scene: Scene) -> None:
    scene.slow_ttft()
    scene.totals["preemptions"] = 1
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (2, Limits(8, 512))


def test_too_little_tpot_slack_forbids_a_higher_limit(scene: Scene) -> None:
    scene.slow_ttft()
    scene.tpot = {36.0: 80}
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (2, Limits(8, 512))


def test_a_prefill_that_dominates_raises_the_token_budget(scene: Scene) -> None:
    scene.totals |= {
        "ttft_missed": 30,
        "queue_milliseconds": 300,
        "queue_count": 30,
        "prefill_milliseconds": 12_000,
        "prefill_count": 30,
    }
    scene.sample(running=8)
    scene.memory = replace(scene.memory, violated_since=NOW - 5)
    decision, _ = scene.decide()
    assert (decision.limits, decision.cause) == (Limits(8, 1024), "RaisedTokenBudget")


def test_an_idle_replica_that_misses_the_target_is_not_multiplied(scene: Scene) -> None:
    scene.totals |= {"ttft_missed": 30, "prefill_milliseconds": 12_000, "prefill_count": 30}
    scene.sample(running=1)
    scene.memory = replace(scene.memory, limits=Limits(8, 2048))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (1, "TargetInfeasible")
    assert "even an idle replica misses this target" in decision.message


def test_slow_tokens_lower_the_batch_limit(scene: Scene) -> None:
    scene.slow_tpot()
    scene.memory = replace(scene.memory, violated_since=NOW - 5)
    decision, _ = scene.decide()
    assert (decision.limits, decision.cause) == (Limits(5, 512), "LoweredBatchLimit")


def test_slow_tokens_among_many_prompts_lower_the_token_budget(scene: Scene) -> None:
    scene.slow_tpot()
    scene.totals |= {"prompt_tokens": 5000}
    scene.memory = replace(scene.memory, violated_since=NOW - 5, limits=Limits(8, 1024))
    decision, _ = scene.decide()
    assert (decision.limits, decision.cause) == (Limits(8, 716), "LoweredTokenBudget")


def test_slow_tokens_never_take_the_budget_below_a_quarter_of_its_highest(scene: Scene) -> None:
    """What a small budget costs nobody knows without a model; prompts would starve."""
    scene.slow_tpot()
    scene.totals |= {"prompt_tokens": 5000}
    scene.memory = replace(scene.memory, violated_since=NOW - 5, limits=Limits(8, 600))
    decision, memory = scene.decide()
    assert decision.limits == Limits(8, 512)
    scene.memory = replace(memory, limits_changed_at=NOW - 60)
    assert scene.decide()[0].limits.max_num_batched_tokens == 512


def test_slow_tokens_at_the_lowest_limits_add_a_replica(scene: Scene) -> None:
    scene.slow_tpot()
    scene.target = replace(scene.target, lowest=Limits(8, 512))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (2, Limits(8, 512))


def test_both_promises_broken_add_a_replica(scene: Scene) -> None:
    scene.slow_tpot()
    scene.slow_ttft()
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (2, Limits(8, 512), "AddedReplicas")


def test_both_promises_broken_at_most_replicas_leave_limits_alone(scene: Scene) -> None:
    scene.slow_tpot()
    scene.slow_ttft()
    scene.target = replace(scene.target, max_replicas=1)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.blocker) == (1, Limits(8, 512), "AtMaxReplicas")


def test_a_past_violation_without_misses_now_changes_nothing(scene: Scene) -> None:
    scene.target = replace(scene.target, highest=Limits(8, 512))
    scene.totals = {"ttft_met": 5, "queue_milliseconds": 9000, "queue_count": 5}
    scene.past = (Slice(NOW - 20, NOW - 9, {"ttft_missed": 40}),)
    decision, _ = scene.decide()
    assert (decision.ttft.verdict, decision.replicas) == ("violated", 1)
    scene.totals["ttft_missed"] = 1
    scene.sample(running=8, waiting=1)
    assert scene.decide()[0].replicas == 2


def test_a_change_of_limits_is_given_time_to_act(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = replace(scene.memory, limits_changed_at=NOW - 3)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (1, Limits(8, 512), "Settling")


def test_a_queue_that_shrinks_fast_enough_needs_no_help(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = replace(scene.memory, backlog=80, backlog_at=NOW - 5)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (1, Limits(8, 512), "Recovering")
    scene.memory = replace(scene.memory, backlog=42, backlog_at=NOW - 5)
    assert scene.decide()[0].limits != Limits(8, 512)


@pytest.mark.parametrize(
    ("age", "want"), [(2.0, "Settling"), (60.0, "AtMaxReplicas")], ids=["had no time yet", "had its time"]
)
def test_the_last_replica_allowed_has_its_time_before_it_is_called_too_few(
    scene: Scene, build: Any, age: float, want: str
) -> None:
    scene.target = replace(scene.target, highest=Limits(8, 512), max_replicas=2)
    scene.replicas["b"] = build.replica("b", ready_at=NOW - age, created_at=NOW - age - 10)
    scene.memory = replace(scene.memory, replicas=2)
    scene.slow_ttft()
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (2, want)


@pytest.mark.parametrize(
    ("age", "reason", "want_replicas", "want_blocker"),
    [
        pytest.param(599.0, "ImagePullBackOff", 2, "ReplicaPending", id="pending is waited for"),
        pytest.param(601.0, "ImagePullBackOff", 3, "ImagePullBackOff", id="past its deadline it is absent"),
        pytest.param(601.0, "Unschedulable", 2, "Unschedulable", id="another would find no place either"),
    ],
)
def test_replicas_asked_for(
    scene: Scene, build: Any, age: float, reason: str, want_replicas: int, want_blocker: str
) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, highest=Limits(8, 512))
    late = build.replica("b", phase="pending", ready_at=None, created_at=NOW - age, reason=reason)
    scene.replicas["b"] = late
    scene.memory = replace(scene.memory, replicas=2, replicas_raised_at=NOW - age)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (want_replicas, want_blocker)
    assert (f"is not ready yet ({reason})" in decision.message) == (want_blocker == "ReplicaPending")


def test_a_pod_that_does_not_exist_yet_is_pending_too(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = replace(scene.memory, replicas=2, replicas_raised_at=NOW - 20)
    scene.target = replace(scene.target, highest=Limits(8, 512))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (2, "ReplicaPending")


def test_fixed_replicas_move_limits_only(scene: Scene) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, fixed_replicas=1)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.blocker) == (1, Limits(32, 512), "FixedReplicas")


def test_another_scaler_keeps_its_replicas(scene: Scene, build: Any) -> None:
    scene.slow_ttft()
    scene.other_scaler = "HorizontalPodAutoscaler/demo"
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (2, "OtherScaler")


def test_without_samples_of_half_the_replicas_everything_holds(scene: Scene) -> None:
    scene.slow_ttft()
    scene.samples = {"a": None}
    scene.errors = {"a": "no answer within 2 s"}
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (1, Limits(8, 512))
    assert (decision.cause, decision.blocker) == ("HoldingWithoutSamples", "SamplesMissing")
    assert "1 of 1 ready replicas give no usable sample: no answer within 2 s" in decision.message


def test_the_spec_bounds_move_replicas_and_limits_at_once(scene: Scene) -> None:
    scene.target = replace(scene.target, min_replicas=3, highest=Limits(4, 128))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (3, Limits(4, 128), "BoundsChanged")
    assert "replicas 1 -> 3" in decision.message


def test_new_targets_are_not_judged_by_old_counters(scene: Scene) -> None:
    scene.slow_ttft()
    scene.sample(waiting=0, oldest_waiting_seconds=0.0)
    scene.target = replace(scene.target, targets=Targets(5000.0, 40.0))
    decision, memory = scene.decide()
    assert (decision.ttft.met, decision.ttft.missed, decision.ttft.verdict) == (0, 0, "unknown")
    assert (decision.replicas, memory.targets) == (1, Targets(5000.0, 40.0))


def test_a_queue_without_a_ttft_target_is_still_helped(scene: Scene) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, targets=Targets(None, 40.0), highest=Limits(8, 512))
    scene.sample(oldest_waiting_seconds=11.0)
    assert scene.decide()[0].replicas == 2
    scene.sample(oldest_waiting_seconds=9.0)
    assert scene.decide()[0].replicas == 1


def watching(scene: Scene, build: Any, seconds: float, *recommended: tuple[float, int]) -> None:
    """Two replicas that have been watched for so long, and what was recommended meanwhile."""
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = replace(scene.memory, replicas=2, watched_since=NOW - seconds, recommended=recommended)


@pytest.mark.parametrize(("seconds", "want"), [(179.0, 2), (180.0, 1)])
def test_one_fewer_waits_for_three_start_up_times(
    scene: Scene, build: Any, seconds: float, want: int
) -> None:
    """As long as nothing was learnt, a start is taken to last a minute."""
    watching(scene, build, seconds)
    decision, memory = scene.decide()
    assert decision.replicas == want
    assert decision.cause == ("Stabilizing" if want == 2 else "RemovedReplica")
    assert memory.replicas_lowered_at == (None if want == 2 else NOW)


def test_one_fewer_waits_for_the_stabilization_time_where_that_is_longer(scene: Scene, build: Any) -> None:
    scene.target = replace(scene.target, stabilization_seconds=400.0)
    watching(scene, build, 399.0)
    assert scene.decide()[0].replicas == 2
    watching(scene, build, 400.0)
    assert scene.decide()[0].replicas == 1


def test_a_start_that_lasts_longer_is_looked_back_on_for_longer(scene: Scene, build: Any) -> None:
    watching(scene, build, 300.0)
    scene.memory = replace(scene.memory, starts=((NOW - 5000, 110.0),))
    assert scene.decide()[0].replicas == 2
    scene.memory = replace(scene.memory, starts=((NOW - 5000, 90.0),))
    assert scene.decide()[0].replicas == 1


def test_the_highest_recommendation_of_the_time_looked_back_keeps_its_replicas(
    scene: Scene, build: Any
) -> None:
    watching(scene, build, 500.0, (NOW - 170.0, 2), (NOW - 100.0, 1))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (2, "Stabilizing")
    assert "1 replicas would do, 2 would not have over the last 180 s" in decision.message
    watching(scene, build, 500.0, (NOW - 190.0, 2), (NOW - 100.0, 1))
    assert scene.decide()[0].replicas == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"running": 4}, id="too many run for one replica"),
        pytest.param({"kv_blocks_used": 500}, id="kv memory would be short"),
        pytest.param({"waiting": 3, "oldest_waiting_seconds": 0.4}, id="a request waits for too long"),
        pytest.param({"taken_at": NOW - 30}, id="samples are stale"),
    ],
)
def test_one_fewer_is_not_enough(scene: Scene, build: Any, change: dict[str, Any]) -> None:
    watching(scene, build, 500.0)
    assert scene.decide()[0].replicas == 1
    scene.sample(**change)
    decision, memory = scene.decide()
    assert decision.replicas == 2
    assert memory.recommended[-1] == (NOW, 2)


def test_a_restart_forgets_that_fewer_would_do_and_nothing_else(scene: Scene) -> None:
    scene.slow_ttft()
    _, memory = scene.decide()
    assert memory.watched_since == NOW
    restored = Memory.from_dict(memory.to_dict(), NOW)
    assert restored == replace(memory, watched_since=None, marks=())


def test_another_version_of_memory_is_a_fresh_one() -> None:
    assert Memory.from_dict({"version": 99}, NOW) == Memory(began_at=NOW)
    assert Memory.from_dict(None, NOW) == Memory(began_at=NOW)


def test_without_memory_the_world_is_taken_as_it_is(scene: Scene, build: Any) -> None:
    scene.memory = Memory.from_dict(None, NOW)
    scene.replicas |= {"b": build.replica("b"), "c": build.replica("c")}
    scene.samples = {name: build.sample(NOW, limits=Limits(16, 1024)) for name in scene.replicas}
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits) == (3, Limits(16, 1024))


def test_a_place_about_to_be_taken_counts_as_taken(scene: Scene) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, lowest=Limits(1, 512))
    scene.memory = replace(scene.memory, limits=Limits(2, 512), violated_since=NOW - 5)
    scene.sample(running=1, limits=Limits(2, 512))
    assert scene.decide()[0].cause == "RaisedBatchLimit"


def test_a_new_replica_without_a_queue_does_not_hide_that_the_other_is_full(scene: Scene, build: Any) -> None:
    scene.slow_ttft()
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = replace(scene.memory, replicas=2, violated_since=NOW - 5)
    assert scene.decide()[0].cause == "RaisedBatchLimit"
    scene.sample(running=5, waiting=20, oldest_waiting_seconds=3.0)
    assert scene.decide()[0].cause == "RaisedTokenBudget"


def test_nothing_is_removed_while_the_gateway_keeps_its_queue_to_itself(scene: Scene, build: Any) -> None:
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = replace(scene.memory, replicas=2, watched_since=NOW - 500)
    scene.gateways = {"gateway": None}
    assert scene.decide()[0].replicas == 2
    scene.gateways = {"gateway": GatewaySample("g", NOW, 0, 0.0, 0, {})}
    assert scene.decide()[0].replicas == 1


def test_another_beginning_of_the_limits_is_taken_at_once(scene: Scene) -> None:
    decision, memory = scene.decide()
    assert decision.limits == Limits(8, 512)
    scene.memory = replace(memory, limits=Limits(40, 1024))
    assert scene.decide()[0].limits == Limits(40, 1024)
    scene.target = replace(scene.target, initial=Limits(16, 256))
    assert scene.decide()[0].limits == Limits(16, 256)


def test_a_service_at_zero_waits_for_nobody(scene: Scene) -> None:
    scene.target = replace(scene.target, fixed_replicas=0)
    scene.replicas, scene.samples = {}, {}
    scene.memory = replace(scene.memory, replicas=0)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.cause) == (0, "ScaledToZero")


@pytest.mark.parametrize(
    ("seconds_ready", "want_replicas", "want_blocker"),
    [(9.0, 2, "Settling"), (10.0, 3, "")],
    ids=["the newest replica has not acted yet", "the newest replica has acted"],
)
def test_a_new_replica_is_given_time_to_act(
    scene: Scene, build: Any, seconds_ready: float, want_replicas: int, want_blocker: str
) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, highest=Limits(8, 512))
    scene.replicas["b"] = build.replica("b", ready_at=NOW - seconds_ready)
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = replace(scene.memory, replicas=2)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (want_replicas, want_blocker)

"""Single decisions: which knob a symptom moves, and what forbids a change."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.slo_scene import NOW, Scene

from headway_operator.samples import Limits, Targets
from headway_operator.slo.slices import Slice


def test_a_queue_at_the_cap_with_slack_raises_the_batch_limit(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = scene.memory._replace(violated_since=NOW - 5)
    decision, memory = scene.decide()
    assert decision.limits == Limits(32, 512)
    assert (decision.replicas, decision.cause, decision.blocker) == (1, "RaisedBatchLimit", "")
    assert "max_num_seqs 8 -> 32; TPOT has 5" in decision.message
    assert "with 40 waiting" in decision.message
    assert memory.limits_changed_at == NOW


def test_the_batch_limit_keeps_room_for_one_token_of_each(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = scene.memory._replace(limits=Limits(8, 16))
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
    scene.memory = scene.memory._replace(limits=limits)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (2, limits, "AddedReplicas")
    assert "replicas 1 -> 2" in decision.message


@pytest.mark.parametrize(
    ("served", "want"),
    [(90, 6), (45, 8), (30, 8), (10, 6)],
    ids=["as many as come", "half", "a third, and no more than doubled", "too few to tell"],
)
def test_without_a_model_what_comes_over_what_is_served_says_how_many(
    scene: Scene, served: int, want: int
) -> None:
    """Requests wait too long at all four replicas, so each does what it can; two are added anyway."""
    decision, _ = crowded(scene, served).decide()
    assert (decision.replicas, decision.cause) == (want, "AddedReplicas")


def test_without_a_model_what_is_on_its_way_counts(scene: Scene) -> None:
    """Eight are called for, and six are asked for already."""
    crowded(scene, 45)
    scene.memory = scene.memory._replace(replicas=6, replicas_raised_at=NOW - 5)
    assert scene.decide()[0].replicas == 8
    scene.memory = scene.memory._replace(replicas=8)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (8, "ReplicaPending")


def test_where_somebody_keeps_up_what_is_served_does_not_say_how_many(scene: Scene) -> None:
    crowded(scene, 45)
    scene.samples["a"] = scene.build.sample(NOW, limits=Limits(64, 512), running=64)
    assert scene.decide()[0].replicas == 6, "half as many more"


def crowded(scene: Scene, served: int) -> Scene:
    """Ten requests a second at four replicas that are full, of which so many got a first token in 9 s."""
    names = "abcd"
    scene.target = replace(scene.target, max_replicas=64)
    scene.replicas = {name: scene.build.replica(name) for name in names}
    scene.samples = dict.fromkeys(names, scene.samples["a"])
    scene.slow_ttft()
    scene.sample(limits=Limits(64, 512), running=64)
    scene.memory = scene.memory._replace(limits=Limits(64, 512), replicas=4)
    scene.totals |= {"arrived": 90, "replica_seconds": 36.0}
    scene.ttft = {900.0: served}
    return scene


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
    scene.memory = scene.memory._replace(violated_since=NOW - 5)
    decision, _ = scene.decide()
    assert (decision.limits, decision.cause) == (Limits(8, 1024), "RaisedTokenBudget")


def test_an_idle_replica_that_misses_the_target_is_not_multiplied(scene: Scene) -> None:
    scene.totals |= {"ttft_missed": 30, "prefill_milliseconds": 12_000, "prefill_count": 30}
    scene.sample(running=1)
    scene.memory = scene.memory._replace(limits=Limits(8, 2048))
    decision, _ = scene.decide()
    assert (decision.replicas, decision.blocker) == (1, "TargetInfeasible")
    assert "even an idle replica misses this target" in decision.message


def test_slow_tokens_lower_the_batch_limit(scene: Scene) -> None:
    scene.slow_tpot()
    scene.memory = scene.memory._replace(violated_since=NOW - 5)
    decision, _ = scene.decide()
    assert (decision.limits, decision.cause) == (Limits(5, 512), "LoweredBatchLimit")


def test_slow_tokens_among_many_prompts_lower_the_token_budget(scene: Scene) -> None:
    scene.slow_tpot()
    scene.totals |= {"prompt_tokens": 5000}
    scene.memory = scene.memory._replace(violated_since=NOW - 5, limits=Limits(8, 1024))
    decision, _ = scene.decide()
    assert (decision.limits, decision.cause) == (Limits(8, 716), "LoweredTokenBudget")


def test_slow_tokens_never_take_the_budget_below_a_quarter_of_its_highest(scene: Scene) -> None:
    """What a small budget costs nobody knows without a model; prompts would starve."""
    scene.slow_tpot()
    scene.totals |= {"prompt_tokens": 5000}
    scene.memory = scene.memory._replace(violated_since=NOW - 5, limits=Limits(8, 600))
    decision, memory = scene.decide()
    assert decision.limits == Limits(8, 512)
    scene.memory = memory._replace(limits_changed_at=NOW - 60)
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
    scene.memory = scene.memory._replace(limits_changed_at=NOW - 3)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (1, Limits(8, 512), "Settling")


def test_a_queue_that_shrinks_fast_enough_needs_no_help(scene: Scene) -> None:
    scene.slow_ttft()
    scene.memory = scene.memory._replace(backlog=80, backlog_at=NOW - 5)
    decision, _ = scene.decide()
    assert (decision.replicas, decision.limits, decision.cause) == (1, Limits(8, 512), "Recovering")
    scene.memory = scene.memory._replace(backlog=42, backlog_at=NOW - 5)
    assert scene.decide()[0].limits != Limits(8, 512)


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


def test_a_place_about_to_be_taken_counts_as_taken(scene: Scene) -> None:
    scene.slow_ttft()
    scene.target = replace(scene.target, lowest=Limits(1, 512))
    scene.memory = scene.memory._replace(limits=Limits(2, 512), violated_since=NOW - 5)
    scene.sample(running=1, limits=Limits(2, 512))
    assert scene.decide()[0].cause == "RaisedBatchLimit"


def test_a_new_replica_without_a_queue_does_not_hide_that_the_other_is_full(scene: Scene, build: Any) -> None:
    scene.slow_ttft()
    scene.replicas["b"] = build.replica("b")
    scene.samples["b"] = build.sample(NOW, limits=Limits(8, 512))
    scene.memory = scene.memory._replace(replicas=2, violated_since=NOW - 5)
    assert scene.decide()[0].cause == "RaisedBatchLimit"
    scene.sample(running=4, waiting=20, oldest_waiting_seconds=3.0)
    assert scene.decide()[0].cause == "RaisedTokenBudget"


def test_another_beginning_of_the_limits_is_taken_at_once(scene: Scene) -> None:
    decision, memory = scene.decide()
    assert decision.limits == Limits(8, 512)
    scene.memory = memory._replace(limits=Limits(40, 1024))
    assert scene.decide()[0].limits == Limits(40, 1024)
    scene.target = replace(scene.target, initial=Limits(16, 256))
    assert scene.decide()[0].limits == Limits(16, 256)

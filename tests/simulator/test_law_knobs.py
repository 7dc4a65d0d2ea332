"""Every row of the table of symptoms as a course: which knob the shipped law moves, and which it leaves."""

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from headway_operator.samples import Limits
from headway_operator.state import Decision
from headway_simulator.cluster import BEGIN_SECONDS
from headway_simulator.engine import SimulatedEngine
from headway_simulator.simulated_runner import Speculation
from headway_simulator.step_model import slower

MOST = Limits(32, 1024)
# What one of the builder's slow replicas can do of requests of 400 prompt and 50 generated tokens.
CAPACITY = 2.08


def is_broken(decision: Decision, *names: str) -> bool:
    return all(getattr(decision, name).verdict == "violated" for name in names)


def seqs(decisions: list[Decision]) -> set[int]:
    return {one.limits.max_num_seqs for one in decisions}


def has_best_limits(decision: Decision) -> bool:
    """Within what is not worth a change."""
    best = decision.evidence["best_max_num_seqs"], decision.evidence["best_max_num_batched_tokens"]
    limits = decision.limits.max_num_seqs, decision.limits.max_num_batched_tokens
    return all(limit == pytest.approx(one, rel=0.2) for limit, one in zip(limits, best, strict=True))


def budgets(decisions: list[Decision]) -> set[int]:
    return {one.limits.max_num_batched_tokens for one in decisions}


def test_a_queue_at_a_low_cap_raises_the_cap_and_adds_nobody(build: Any) -> None:
    course = build.course(
        build.steps((200, 0.8)), build.slow(batching={"maxNumSeqs": {"max": 32, "initial": 2}})
    )
    course.run()
    raised = next(one for one in course.decisions if one.limits.max_num_seqs > 2)
    assert is_broken(raised, "ttft")
    assert raised.cause == "RaisedBatchLimit"
    broken = next(one for one in course.decisions if is_broken(one, "ttft"))
    assert raised.at - broken.at <= 15.0
    assert raised.at - BEGIN_SECONDS <= 45.0
    assert has_best_limits(course.decisions[-1])
    assert course.decisions[-1].limits.max_num_seqs > 20
    assert {one.replicas for one in course.decisions} == {1}
    assert course.decisions[-1].ttft.verdict == "met"


def test_a_queue_at_a_low_cap_that_no_cap_can_end_adds_replicas_as_well(build: Any) -> None:
    course = build.course(
        build.steps((60, 0.5), (60, 2.4 * CAPACITY)),
        build.slow(batching={"maxNumSeqs": {"max": 32, "initial": 2}}),
    )
    course.run()
    overloaded = course.between(60, 100)
    assert {"RaisedBatchLimit", "AddedReplicas"} <= {one.cause for one in overloaded}
    assert has_best_limits(overloaded[-1])
    assert overloaded[-1].limits.max_num_seqs > 20
    assert overloaded[-1].replicas >= 3


def test_memory_that_is_short_adds_replicas_and_raises_no_cap(build: Any) -> None:
    """Seven sequences fill the cache. A queue waits from the start, before a model is learnt and after."""
    course = build.course(
        build.steps((120, 2.4)),
        build.slow(
            model=replace(build.slow_model, kv_cache_tokens=3200),
            batching={"maxNumSeqs": {"max": 32, "initial": 7}},
        ),
    )
    run = course.run()
    full = [one for one in course.decisions if one.evidence["kv_use"] >= 0.85]
    assert len([one for one in full if is_broken(one, "ttft")]) >= 3
    for before, after in pairwise(course.decisions):
        if after in full:
            assert after.limits.max_num_seqs <= before.limits.max_num_seqs
    assert course.decisions[-1].replicas >= 3
    assert run.num_preemptions == 0


def test_prompts_that_take_long_raise_the_budget_and_add_nobody(build: Any) -> None:
    batching = {"maxNumBatchedTokens": {"max": 1024, "initial": 64}}
    course = build.course(build.steps((150, 0.5), prompt=1500, output=20), build.slow(batching=batching))
    course.run()
    raised = next(one for one in course.decisions if one.limits.max_num_batched_tokens > 64)
    assert is_broken(raised, "ttft")
    assert raised.cause == "RaisedTokenBudget"
    broken = next(one for one in course.decisions if is_broken(one, "ttft"))
    assert raised.at - broken.at <= 15.0, "no model has to be learnt for that"
    assert raised.limits.max_num_seqs == 32
    assert budgets(course.decisions[-10:]) == {1024}
    assert {one.replicas for one in course.decisions} == {1}


@pytest.mark.parametrize(
    ("promise", "words"),
    [
        pytest.param({"ttftMilliseconds": 150}, "prefill alone takes", id="a prompt takes 200 ms alone"),
        pytest.param(
            {"tpotMilliseconds": 40}, "a step with one sequence takes", id="a decode takes 44 ms alone"
        ),
    ],
)
def test_a_promise_that_an_idle_replica_breaks_is_called_so_and_adds_nobody(
    build: Any, promise: dict[str, int], words: str
) -> None:
    course = build.course(build.steps((150, 1.6)), build.slow(slo=promise, initial_replicas=2))
    course.run()
    known = [one for one in course.decisions if "capacity_per_second" in one.evidence]
    assert len(known) >= 10
    assert not any(b.replicas > a.replicas for a, b in pairwise(known))
    assert known[-1].blocker == "TargetInfeasible"
    assert words in known[-1].message
    assert known[-1].advice


@pytest.mark.usefixtures("only_steps_tell")
def test_slow_tokens_between_long_prompts_lower_the_budget_and_by_a_fifth_at_most(build: Any) -> None:
    """With a batch whose size the spec fixes, and steps told half as long as they are: else no batch and no
    budget is as large as to break TPOT."""
    course = build.course(
        build.steps((120, 0.3), (230, 0.85), prompt=1500, output=40),
        build.slow(
            slo={"tpotMilliseconds": 260, "ttftMilliseconds": 8000},
            scaling={"maxReplicas": 1},
            batching={"maxNumSeqs": {"min": 32, "max": 32}},
            step_time_error=0.5,
        ),
    )
    course.run()
    assert any(one.cause == "LoweredTokenBudget" and is_broken(one, "tpot") for one in course.decisions)
    shares = [
        one.limits.max_num_batched_tokens / one.evidence["best_max_num_batched_tokens"]
        for one in course.decisions
        if "best_max_num_batched_tokens" in one.evidence
    ]
    assert min(shares) == pytest.approx(0.8, abs=0.01)
    assert seqs(course.decisions) == {32}


@pytest.mark.usefixtures("only_steps_tell")
def test_slow_tokens_of_many_sequences_lower_the_cap_and_then_add_replicas(build: Any) -> None:
    """The steps are told half as long as they are, so the model's best cap is too high."""
    course = build.course(
        build.steps((120, 0.6), (600, 1.3), prompt=100, output=120),
        build.slow(
            slo={"tpotMilliseconds": 110},
            batching={"maxNumBatchedTokens": {"min": 1024, "max": 1024}},
            step_time_error=0.5,
        ),
    )
    course.run()
    lowered = next(
        after
        for before, after in pairwise(course.decisions)
        if after.limits.max_num_seqs
        < min(before.limits.max_num_seqs, after.evidence.get("best_max_num_seqs", 0))
    )
    assert lowered.cause == "LoweredBatchLimit"
    assert is_broken(lowered, "tpot")
    assert lowered.replicas == 1
    assert budgets(course.decisions) == {1024}
    assert max(one.replicas for one in course.between(lowered.at - BEGIN_SECONDS, 420)) > 1
    assert course.decisions[-1].tpot.verdict == "met"


def test_both_broken_take_the_best_limits_for_a_crowd_and_replicas_at_once(build: Any) -> None:
    course = build.course(
        build.steps((60, 3.0), prompt=200, output=80),
        build.slow(
            slo={"tpotMilliseconds": 150},
            batching={
                "maxNumSeqs": {"max": 32, "initial": 28},
                "maxNumBatchedTokens": {"max": 1024, "initial": 256},
            },
        ),
    )
    course.run()
    pairs = [*pairwise(course.decisions)]
    both = [(a, b) for a, b in pairs if is_broken(b, "ttft", "tpot") and b.limits != a.limits]
    assert both
    for _, after in both:
        # The model's best while more load comes than can be served.
        best = (after.evidence["full_max_num_seqs"], after.evidence["best_max_num_batched_tokens"])
        assert (after.limits.max_num_seqs, after.limits.max_num_batched_tokens) == best
    before, after = both[0]
    assert after.replicas > before.replicas


def test_one_slow_replica_among_idle_ones_is_named_and_nothing_is_moved(build: Any) -> None:
    slow_since: list[float] = []

    def slowed(shown: Any) -> Any:
        """In the pause the first replica dies; the one in its place is six times as slow as the others."""
        deployment, now = course.simulation.deployment, BEGIN_SECONDS + shown.at
        names = [pod.name for pod in deployment.living]
        if shown.at > 110 and "pod-1" in names:
            deployment.die(deployment.living[names.index("pod-1")], now)
        newest = deployment.living[-1]
        if newest.name == "pod-5" and newest.phase == "ready" and not slow_since:
            engine = replace(course.setting.engine, model=slower(build.slow_model, 6.0))
            newest.engine = SimulatedEngine(engine, now, "slow")
            slow_since.append(shown.at)
        return shown

    course = build.course(
        build.steps((110, 2.0), (40, 0.001), (200, 2.0)),
        build.slow(initial_replicas=4, scaling={"minReplicas": 4}),
        slowed,
    )
    course.run()
    named = [one for one in course.between(slow_since[0], 350) if one.sick]
    assert named
    assert "SickReplica" in {one.blocker for one in named}
    assert all(one.sick.startswith("pod-5 in ") for one in named)
    assert {one.replicas for one in course.decisions} == {4}
    assert len({one.limits for one in named}) == 1
    assert min(one.kappa for one in course.memories) == 1.0


@pytest.mark.usefixtures("only_steps_tell")
def test_limits_are_looked_at_every_fifteen_seconds_and_trimmed_within_a_fifth(build: Any) -> None:
    course = build.course(
        build.steps((60, 0.6), (240, 1.2), prompt=100, output=120),
        build.slow(slo={"tpotMilliseconds": 110}, scaling={"maxReplicas": 1}, step_time_error=0.5),
    )
    course.run()
    learnt = [one for one in course.decisions if "best_max_num_seqs" in one.evidence]
    changed = [b for a, b in pairwise(learnt) if b.limits != a.limits]
    assert len(changed) >= 4
    assert all(b.at - a.at >= 15.0 for a, b in pairwise(changed))
    for one in changed:
        best = one.evidence["best_max_num_seqs"]
        assert round(0.8 * best) <= one.limits.max_num_seqs <= round(1.2 * best)


def test_a_target_that_guesses_alone_keep_is_sized_by_what_they_bring(build: Any) -> None:
    """A plain step takes 44 ms beside nothing else, four of five guesses come true; 40 ms are promised."""
    setting = build.slow(slo={"tpotMilliseconds": 40}, initial_replicas=2)
    engine = replace(setting.engine, speculation=Speculation(4, 0.8))
    course = build.course(build.steps((150, 0.3), (250, 0.9)), replace(setting, engine=engine))
    course.run()
    learnt = [one for one in course.decisions if "best_max_num_seqs" in one.evidence]
    assert learnt
    assert not any(one.advice for one in learnt), "it is none that no number of replicas keeps"
    assert min(one.limits.max_num_seqs for one in learnt) > 1
    assert max(one.replicas for one in learnt) <= 4, "for plain steps it would be sixteen"
    later = course.between(260, 390)
    assert median(one.tpot.p_milliseconds or 0.0 for one in later) < 40.0
    assert {one.ttft.verdict for one in later} == {"met"}

"""Every rule of stability as a course: how fast the shipped law goes up and down, and what holds it."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headway_operator.slo import resume
from headway_simulator.cluster import BEGIN_SECONDS
from headway_simulator.measures import reversals

# Removal looks back two start-up times of a minute, while no start has been seen; recommendations are kept
# in slots of so many seconds.
LOOKED_BACK_SECONDS, SLOT_SECONDS = 120.0, 10.0
# Of twelve slots two may have called for more.
MOMENTS_SECONDS = 20.0
# Where a removal is to come well after the load has fallen.
LONGER_SECONDS = 180.0
LONGER = {"maxReplicas": 8, "stabilizationSeconds": int(LONGER_SECONDS)}


def without_samples(shown: Any, *names: str) -> Any:
    """No sample of these replicas; of none at all, and none of the gateway, where none is named."""
    lost = names or tuple(shown.sample.replicas)
    sample = replace(
        shown.sample,
        replicas={name: None if name in lost else one for name, one in shown.sample.replicas.items()},
        gateways=shown.sample.gateways if names else dict.fromkeys(shown.sample.gateways),
    )
    return shown._replace(sample=sample)


def falling(build: Any, change: Any = None, **setting: Any) -> Any:
    """Four replicas whose load falls, after two minutes, to what one of them can do."""
    load = build.steps((120, 4.0), (200, 0.5), seed=2)
    asked = build.slow(initial_replicas=4, scaling=LONGER, **setting)
    return build.course(load, asked) if change is None else build.course(load, asked, change)


# --- up


@pytest.mark.parametrize(
    ("ready", "calm", "rate", "want"),
    [
        pytest.param(1, 200.0, 40.0, 5, id="four more where that is more than double"),
        pytest.param(5, 90.0, 30.0, 10, id="doubled"),
        pytest.param(9, 90.0, 70.0, 17, id="eight more at most"),
    ],
)
def test_up_is_at_once_and_bounded(build: Any, ready: int, calm: float, rate: float, want: int) -> None:
    """calm: seconds in which the step time is learnt, by one replica in more of them than by several."""
    course = build.course(
        build.steps((calm, 0.5 * ready), (20, rate)),
        build.slow(initial_replicas=ready, scaling={"maxReplicas": 64}),
    )
    course.run()
    at, before, after = course.moves()[0]
    assert (before, after) == (ready, want)
    assert calm < at <= calm + 12
    for _, low, high in course.moves():
        assert high - low <= min(8, max(4, low))


def test_a_load_that_grows_slowly_is_met_before_a_promise_breaks(build: Any) -> None:
    rises = [(20, 0.8 + 0.2 * step) for step in range(26)]
    course = build.course(build.steps(*rises), build.slow())
    course.run()
    assert "violated" not in {
        verdict for one in course.decisions for verdict in (one.ttft.verdict, one.tpot.verdict)
    }
    assert course.moves()[-1][2] >= 3


def test_a_queue_adds_more_than_the_rate_alone_calls_for(build: Any) -> None:
    """Three times what the one replica allowed can do; then the load is gone, and more are allowed."""

    def edited(shown: Any) -> Any:
        return shown if shown.at < 180 else shown._replace(target=replace(shown.target, max_replicas=8))

    load = build.steps((60, 0.8), (70, 6.5), (70, 0.3))
    course = build.course(load, build.slow(scaling={"maxReplicas": 1}), edited)
    course.run()
    numbers = course.between(180, 186)[0].evidence
    assert numbers["late"] > 0
    ahead = numbers["expected_per_second"]
    rate = ahead + 1.3 * math.sqrt(numbers["index_of_dispersion"] * ahead / numbers["lead_seconds"])
    of_the_rate = math.ceil(rate / (numbers["kappa"] * numbers["capacity_per_second"]))
    assert numbers["recommended_replicas"] > of_the_rate
    assert course.moves()[0][1:] == (1, numbers["recommended_replicas"])


def test_what_is_pending_is_not_asked_for_twice_and_freezes_nothing(build: Any) -> None:
    """Replicas that take 100 s to start; the load doubles again while they do."""
    course = build.course(
        build.steps((60, 0.8), (30, 3.0), (50, 6.0)), build.slow(initial_replicas=2, cold_start_seconds=100.0)
    )
    course.run()
    added = [one for one in course.decisions if one.cause == "AddedReplicas"]
    assert all(one.replicas == one.evidence["recommended_replicas"] for one in added)
    assert len([one for one in added if one.evidence["pending"]]) >= 2
    assert course.decisions[-1].evidence["pending"] == course.decisions[-1].replicas - 2


def test_a_promise_that_the_model_thinks_kept_costs_trust_which_adds_replicas(build: Any) -> None:
    course = build.course(
        build.steps((120, 0.6), (240, 1.3), prompt=100, output=120),
        build.slow(slo={"tpotMilliseconds": 110}, step_time_error=0.5),
        build.without_gaps,
    )
    course.run()
    trust = [one.kappa for one in course.memories]
    assert min(trust) < 0.9
    assert all(0.5 <= one <= 1.2 for one in trust)
    # It comes back slowly, but for what the model has come to tell itself since it was cut: what one is
    # trusted with is then no more than right after the cut.
    for (before, after), decision in zip(pairwise(course.memories), course.decisions[1:], strict=True):
        if after.kappa > 1.005 * before.kappa:
            assert after.cut is not None
            trusted = after.kappa * decision.evidence["capacity_per_second"]
            assert trusted <= 1.01 * after.cut.after * after.cut.per_second
    assert course.moves()[-1][2] > 1


def test_trust_in_a_wrong_model_does_not_swing(build: Any) -> None:
    """Forty minutes of steps that take twice as long as they tell: replicas that a cut has brought keep the
    promise, which is no reason to trust the model as before."""
    course = build.course(
        build.steps((120, 0.6), (2280, 1.3), prompt=100, output=120),
        build.slow(slo={"tpotMilliseconds": 110}, step_time_error=0.5, interval_seconds=10.0),
        build.without_gaps,
    )
    course.run()
    trust = [one.kappa for one in course.memories]
    assert sum(after < before for before, after in pairwise(trust)) <= 7
    assert {one.replicas for one in course.between(900, 2280)} == {2}


def test_a_queue_at_a_replica_that_does_less_than_its_steps_tell_adds_another(build: Any) -> None:
    """What a server does beside its steps is in none of them; lateness explains all that is missed, and the
    rate, which rises slowly, stays below what one is thought to do."""
    slope = [(30, 6.0 + 0.32 * i) for i in range(1, 11)]
    course = build.course(
        build.steps((90, 6.0), *slope, (120, 9.2), prompt=100, output=60),
        build.slow(
            slo={"ttftMilliseconds": 1000},
            batching={"maxNumSeqs": {"max": 16}},
            model=build.model,
            step_time_error=0.7,
        ),
        build.without_gaps,
    )
    course.run()
    at, before, after = course.moves()[-1]
    assert (before, after) == (1, 2)
    assert at > 90
    stood = [one.evidence for one in course.between(at - 60.0, at)]
    assert all(one["requests_per_second"] < one["capacity_per_second"] for one in stood)
    assert stood[-1]["trusted_per_second"] < stood[0]["trusted_per_second"]
    assert not any(one.evidence["late"] for one in course.between(at + 60.0, math.inf))


def test_trust_is_not_won_by_time_alone(build: Any) -> None:
    """Two requests a minute prove nothing, whatever becomes of them."""
    setting = build.slow(interval_seconds=10.0, scaling={"maxReplicas": 1})
    course = build.course(build.steps((200, 1.6), (450, 0.03)), setting)
    course.run()
    at_first = [one.kappa for one in course.memories if one.kappa_at and one.kappa_at - BEGIN_SECONDS > 520]
    assert len(set(at_first)) == 1
    assert at_first[0] > 1.0


def test_trust_comes_back_faster_where_nothing_is_missed(build: Any) -> None:
    """By up to 5% a minute; by 1% where replicas have little to do, or where many were late lately."""

    def cut(shown: Any) -> Any:
        return shown._replace(memory=replace(shown.memory, kappa=0.8)) if shown.at < 180 else shown

    def won(at_first: float, then: float) -> float:
        course = build.course(
            build.steps((60, at_first), (220, then)), build.slow(scaling={"maxReplicas": 1}), cut
        )
        course.run()
        trust = [one.kappa for one in course.memories if 180 < (one.kappa_at or 0.0) - BEGIN_SECONDS <= 240]
        return float(trust[-1] / trust[0]) - 1.0

    assert 0.03 < won(1.3, 1.3) < 0.051
    assert won(1.3, 0.5) == pytest.approx(0.01, rel=0.15), "no replica does what it is trusted with"
    assert 0.002 < won(3.0, 1.3) < 0.0115


# --- down


def test_down_begins_after_the_time_looked_back(build: Any) -> None:
    """A fleet of which all is well, to the second."""
    course = falling(build)
    course.run()
    assert course.moves() == [(180, 4, 3), (280, 3, 2), (290, 2, 1)]
    assert {one.ttft.verdict for one in course.between(180, 300)} == {"met"}


def test_down_is_one_at_a_time_however_few_would_do(build: Any) -> None:
    """Five replicas for what one can do. Until the model is learnt what there is counts as recommended."""
    course = build.course(build.steps((300, 0.8)), build.slow(initial_replicas=5, interval_seconds=10.0))
    course.run()
    assert course.moves()[0][0] >= LOOKED_BACK_SECONDS
    assert [(before, after) for _, before, after in course.moves()] == [(5, 4), (4, 3), (3, 2), (2, 1)]


def test_a_large_fleet_goes_down_by_a_tenth(build: Any) -> None:
    course = build.course(
        build.steps((250, 2.0)),
        build.slow(initial_replicas=30, scaling={"maxReplicas": 30}, interval_seconds=10.0),
    )
    course.run()
    at, before, after = course.moves()[0]
    assert at >= LOOKED_BACK_SECONDS
    assert (before, after) == (30, 27)


def test_the_highest_recommendation_of_the_time_looked_back_holds(build: Any) -> None:
    """Half-minutes of load and of next to none: what the crests call for stays through the troughs."""
    waves = [(30, rate) for _ in range(5) for rate in (5.4, 0.6)]
    course = build.course(build.steps(*waves, (100, 0.6)), build.slow(initial_replicas=6))
    course.run()
    removals = [one for one in course.decisions if one.cause == "RemovedReplica"]
    assert removals
    for removal in removals:
        since = removal.at - LOOKED_BACK_SECONDS + SLOT_SECONDS
        higher = [
            one.at
            for one in course.decisions
            if since < one.at <= removal.at and one.evidence["recommended_replicas"] > removal.replicas
        ]
        assert len(higher) * 5.0 <= MOMENTS_SECONDS, "a crest lasts longer"
        assert removal.evidence["recommended_replicas"] <= removal.replicas, "and is no moment that is over"
    held = [one for one in course.between(LOOKED_BACK_SECONDS, 300) if one.cause == "Stabilizing"]
    assert min(one.evidence["recommended_replicas"] for one in held) <= held[0].replicas - 2


@pytest.mark.parametrize("rate", [1.3, 1.7, 3.1])
def test_a_load_near_what_a_number_can_do_does_not_flap(build: Any, rate: float) -> None:
    course = build.course(build.steps((360, rate)), build.slow(initial_replicas=2))
    course.run()
    assert reversals(high - low for _, low, high in course.moves()) <= 1


@pytest.mark.parametrize(
    ("seconds", "want"), [pytest.param(300, 2, id="over soon"), pytest.param(1500, 1, id="lasting")]
)
def test_a_spell_of_light_requests_removes_none_until_it_is_what_is_usual(
    build: Any, seconds: int, want: int
) -> None:
    """Two replicas have served a rate for ten minutes at least; now each request brings six tenths."""
    heavy = build.steps((900, 2.2))
    light = build.steps((seconds, 2.2), prompt=240, output=30, seed=2)
    later = [replace(one, at_seconds=900.0 + one.at_seconds) for one in light.arrivals]
    load = replace(heavy, arrivals=(*heavy.arrivals, *later), duration_seconds=900.0 + seconds)
    course = build.course(load, build.slow(initial_replicas=2))
    course.run()
    moves = [(before, after) for at, before, after in course.moves() if at > 300.0]
    assert moves == ([] if want == 2 else [(2, 1)])
    assert course.decisions[-1].replicas == want


def test_a_removal_that_is_regretted_makes_the_next_one_wait(build: Any) -> None:
    """A load that comes for two minutes of each six: two replicas, one, two, and then two for longer."""
    waves = [(240.0, 0.5), (120.0, 1.6)] * 5
    course = build.course(build.steps(*waves), build.slow(initial_replicas=2, interval_seconds=10.0))
    course.run()
    patience = [one.patience for one in course.memories]
    assert patience[0] == 1.0
    assert patience[-1] >= 3.0
    # Down to one; a third replica that a wave's queue called for goes sooner, and nobody regrets it.
    removals = [at for at, before, after in course.moves() if after == 1 < before]
    assert len(removals) <= 3, course.moves()


def test_a_load_that_goes_on_to_rise_regrets_no_removal(build: Any) -> None:
    """One of two goes; the load calls for it again, half a minute later for many, and then for one."""
    load = build.steps((240, 0.5), (30, 1.8), (60, 6.0), (60, 0.5))
    course = build.course(load, build.slow(initial_replicas=2))
    course.run()
    assert course.moves()[0][1:] == (2, 1)
    patience = [one.patience for one in course.memories]
    assert (max(patience), patience[-1]) == (3.0, 1.0)


# --- what there is no place for


def test_replicas_without_a_place_go_when_the_load_falls(build: Any) -> None:
    course = build.course(build.steps((60, 0.8), (90, 5.0), (200, 0.5)), build.slow(most_pods=2))
    course.run()
    highest = max(one.replicas for one in course.decisions)
    assert highest > 2
    lowered = [(before, after) for _, before, after in course.moves() if after < before]
    assert lowered[-1] == (2, 1), "one that serves is removed in its own turn"
    assert course.decisions[-1].replicas == 1


@pytest.mark.parametrize(
    ("setting", "want", "blocker"),
    [
        pytest.param({"most_pods": 2}, 3, "Unschedulable", id="no place is asked for again"),
        pytest.param(
            {"cold_start_seconds": 5000.0}, 4, "PendingPastDeadline", id="one substitute, and no more"
        ),
    ],
)
def test_a_replica_past_its_deadline_is_replaced_once_at_most(
    build: Any, setting: dict[str, Any], want: int, blocker: str
) -> None:
    """Three at least are asked for; one of them never gets ready, nor does what is asked for in its stead."""
    course = build.course(
        build.steps((1500, 0.2)),
        build.slow(scaling={"minReplicas": 3}, initial_replicas=2, interval_seconds=10.0, **setting),
    )
    course.run()
    assert {one.replicas for one in course.between(0, 600)} == {3}
    assert {one.replicas for one in course.between(620, 1501)} == {want}
    assert {one.blocker for one in course.between(620, 1501)} == {blocker}


# --- when in doubt


def test_blind_it_holds_everything_but_the_minimum(build: Any) -> None:
    def blind(shown: Any) -> Any:
        if shown.at < 150:
            return shown
        shown = without_samples(shown)
        return shown._replace(target=replace(shown.target, min_replicas=5)) if shown.at > 280 else shown

    course = falling(build, blind)
    course.run()
    held = course.between(175, 280)
    assert {(one.replicas, one.blocker) for one in held} == {(4, "SamplesMissing")}
    assert course.moves()[0][1:] == (4, 5)
    assert course.moves()[0][0] <= 290


def test_a_single_missing_sample_holds_every_removal(build: Any) -> None:
    def partial(shown: Any) -> Any:
        return without_samples(shown, "pod-2") if 170 <= shown.at < 290 else shown

    course = falling(build, partial)
    course.run()
    assert course.moves()[0][0] >= 290
    assert course.moves()[0][1:] == (4, 3)


def test_after_a_restart_nothing_is_removed_for_the_time_looked_back(build: Any) -> None:
    """A moment before the first removal is due."""
    restarted: list[float] = []

    def restart(shown: Any) -> Any:
        if shown.at < 175 or restarted:
            return shown
        restarted.append(shown.at)
        checkpoint = json.loads(json.dumps(shown.memory.to_dict()))
        return shown._replace(memory=resume(checkpoint, shown.sample, BEGIN_SECONDS + shown.at))

    course = build.course(
        build.steps((120, 4.0), (300, 0.5), seed=2),
        build.slow(initial_replicas=4, scaling=LONGER),
        restart,
    )
    course.run()
    assert course.moves()[0][0] >= int(restarted[0]) + LONGER_SECONDS
    assert course.moves()[0][1:] == (4, 3)


def test_another_writer_of_the_number_is_left_to_it(build: Any) -> None:
    def rival(shown: Any) -> Any:
        return shown._replace(observed=replace(shown.observed, other_scaler="HorizontalPodAutoscaler/demo"))

    course = build.course(build.steps((60, 1.0), (60, 5.0)), build.slow(initial_replicas=2), rival)
    course.run()
    assert not course.moves()
    assert {one.blocker for one in course.decisions} == {"OtherScaler"}


def test_nobody_asks_and_none_is_left_until_somebody_does(build: Any) -> None:
    """Of those that come back 24 wait at the next pass, and a replica that runs eight takes twice as many."""

    course = build.course(
        build.steps((60, 1.0), (143, 0.0), (5, 12.0), (32, 0.2)),
        build.slow(
            scaling={"minReplicas": 0, "idleSeconds": 60},
            batching={"maxNumSeqs": {"max": 8}},
        ),
    )
    run = course.run()
    (slept_at, *slept), (woken_at, *woken) = course.moves()[:2]
    assert slept == [1, 0]
    assert 120 <= slept_at <= 140
    assert woken == [0, 2]
    assert 200 <= woken_at <= 206
    assert {one.fate for one in run.flights} == {"finished"}


def test_what_comes_while_the_first_replica_starts_is_not_left_to_it(build: Any) -> None:
    """One wakes the service, a crowd comes while it starts: more start beside it."""
    load = build.steps((60, 1.0), (140, 0.0), (10, 0.3), (60, 8.0), (30, 0.5))
    scaling = {"minReplicas": 0, "idleSeconds": 60}
    course = build.course(load, build.slow(scaling=scaling, cold_start_seconds=60.0))
    course.run()
    (_, *slept), (woken_at, *woken), *grown = course.moves()
    assert (slept, woken) == ([1, 0], [0, 1])
    while_starting = [(at, after) for at, _, after in grown if at < woken_at + 60]
    assert while_starting[-1][1] >= 2
    assert while_starting[0][0] <= woken_at + 40

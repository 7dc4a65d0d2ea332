"""What holds the shipped law back, as a course: how slowly it goes down, what has no place, and doubt."""

import json
from dataclasses import replace
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


def test_after_a_regret_a_load_that_has_fallen_far_is_followed_as_before(build: Any) -> None:
    """One is too few for what comes for a minute and a half; of what comes later it could take five times."""
    fell_at, looked_back = 330.0, 60.0
    load = build.steps((240, 1.5), (90, 2.3), (400, 0.3))
    course = build.course(load, build.slow(initial_replicas=3))
    course.run()
    assert course.memories[-1].patience == 3.0
    assert 0.5 < course.memories[-1].regretted_rise < 2.0
    down = [at for at, before, after in course.moves() if at > fell_at and after < before]
    assert looked_back - MOMENTS_SECONDS <= down[0] - fell_at < 1.5 * looked_back, course.moves()
    assert course.decisions[-1].replicas == 1


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
        build.steps((60, 0.8), (143, 0.0), (5, 12.0), (32, 0.2)),
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

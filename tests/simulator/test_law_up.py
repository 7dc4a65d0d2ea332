"""How the shipped law goes up, as a course: at once and bounded, and what its trust in the model adds."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headway_simulator.cluster import BEGIN_SECONDS
from headway_simulator.simulated_runner import Speculation
from headway_simulator.step_model import DEFAULT_PROFILE, PROFILES
from headway_simulator.trace import Arrival, Trace


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


@pytest.mark.usefixtures("only_steps_tell")
def test_a_promise_that_the_model_thinks_kept_costs_trust_which_adds_replicas(build: Any) -> None:
    course = build.course(
        build.steps((120, 0.6), (240, 1.3), prompt=100, output=120),
        build.slow(slo={"tpotMilliseconds": 110}, step_time_error=0.5),
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


@pytest.mark.usefixtures("only_steps_tell")
def test_trust_in_a_wrong_model_does_not_swing(build: Any) -> None:
    """Forty minutes of steps that take twice as long as they tell: replicas that a cut has brought keep the
    promise, which is no reason to trust the model as before."""
    course = build.course(
        build.steps((120, 0.6), (2280, 1.3), prompt=100, output=120),
        build.slow(slo={"tpotMilliseconds": 110}, step_time_error=0.5, interval_seconds=10.0),
    )
    course.run()
    trust = [one.kappa for one in course.memories]
    assert sum(after < before for before, after in pairwise(trust)) <= 7
    assert {one.replicas for one in course.between(900, 2280)} == {2}


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_a_model_that_is_told_wrong_is_put_right_by_what_requests_saw(build: Any, error: float) -> None:
    """Twenty minutes of steps and times between tokens that are told wrong; requests' own means are not."""
    load = build.steps((120, 0.6), (1080, 1.3), prompt=100, output=120)
    course, right = (
        build.course(load, build.slow(slo={"tpotMilliseconds": 110}, step_time_error=one))
        for one in (error, 1.0)
    )
    course.run()
    right.run()
    known = course.between(300, 1200)
    bases = [one.evidence["step_base_milliseconds"] for one in known]
    assert all(
        0.9 * build.slow_model.base_milliseconds <= base <= 1.1 * build.slow_model.base_milliseconds
        for base in bases
    )
    assert all(one.kappa_cut_at is None for one in course.memories)
    seconds, wanted = (sum(one.replicas for one in it.between(300, 1200)) for it in (course, right))
    assert seconds == pytest.approx(wanted, rel=0.1)


def rising(chance: random.Random) -> Iterator[Arrival]:
    """A load that is twenty times as high from 900 s on, of answers that last a minute."""
    for begin, end, rate in ((0.0, 900.0, 0.15), (900.0, 1200.0, 3.0)):
        at = begin + chance.expovariate(rate)
        while at < end:
            yield Arrival(at, 500, max(2, int(1500 * chance.lognormvariate(0.0, 0.4))))
            at += chance.expovariate(rate)


def jumping(chance: random.Random) -> Iterator[Arrival]:
    """Seven requests a second for a minute and a half of every four, else one; all of one size."""
    for number in range(4):
        for begin, end, rate in ((0.0, 150.0, 1.0), (150.0, 240.0, 7.0)):
            at = 240.0 * number + begin + chance.expovariate(rate)
            while at < 240.0 * number + end:
                yield Arrival(at, 2000, 300)
                at += chance.expovariate(rate)


def unlike(chance: random.Random) -> Iterator[Arrival]:
    """Each half minute forty prompts of 3,000 tokens with answers of three, beside a few long answers."""
    for number in range(24):
        yield from (Arrival(30.0 * number + 0.3 * chance.random(), 3000, 3) for _ in range(40))
        yield Arrival(30.0 * number + 10.0 + 10.0 * chance.random(), 300, 2500)


def steady(chance: random.Random) -> Iterator[Arrival]:
    """Eight requests a second."""
    at = 0.0
    while (at := at + chance.expovariate(8.0)) < 150.0:
        yield Arrival(at, 400, 2 + int(200 * chance.lognormvariate(0.0, 0.5)))


@pytest.mark.parametrize(
    ("arrivals", "engine", "slo"),
    [
        pytest.param(rising, {}, (2000, 40), id="tokens tell of a jump before requests have ended"),
        pytest.param(jumping, {}, (2000, 40), id="jumps of requests that are all alike"),
        pytest.param(unlike, {}, (8000, 300), id="short answers are slow and long ones fast"),
        pytest.param(steady, {"speculation": Speculation(4, 0.7)}, (2000, 30), id="guesses make many tokens"),
    ],
)
def test_a_model_that_is_told_right_is_not_doubted(
    build: Any,
    arrivals: Callable[[random.Random], Iterator[Arrival]],
    engine: dict[str, Any],
    slo: tuple[int, int],
) -> None:
    came = sorted(arrivals(random.Random(1)), key=lambda one: one.at_seconds)
    setting = build.setting(
        engine={"model": PROFILES[DEFAULT_PROFILE], "max_model_len": 32_768, **engine},
        cold_start_seconds=180.0,
    )
    service = build.service(ttftMilliseconds=slo[0], tpotMilliseconds=slo[1])
    course = build.course(
        Trace("told right", tuple(came), came[-1].at_seconds + 1.0), replace(setting, service=service)
    )
    course.run()
    known = [one.evidence["step_pace"] for one in course.decisions if "step_pace" in one.evidence]
    assert len(known) > 20
    assert set(known) == {1.0}
    assert not any(one.pace.is_doubted for one in course.memories)


@pytest.mark.usefixtures("only_steps_tell")
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
        return shown._replace(memory=shown.memory._replace(kappa=0.8)) if shown.at < 180 else shown

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

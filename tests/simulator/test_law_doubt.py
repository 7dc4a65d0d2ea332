"""What the shipped law does, as a course, where samples are old or contradict those before; and a clock."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headway_simulator.cluster import BEGIN_SECONDS

# So long samples are of no use; removals are due in this time, as `test_law_stability` has them.
DOUBT = (170.0, 290.0)
LOOKED_BACK_SECONDS = 180.0


def falling(build: Any, change: Callable[[Any], Any]) -> Any:
    """Four replicas whose load falls, after two minutes, to what one of them can do."""
    scaling = {"maxReplicas": 8, "stabilizationSeconds": int(LOOKED_BACK_SECONDS)}
    load = build.steps((120, 4.0), (200, 0.5), seed=2)
    course = build.course(load, build.slow(initial_replicas=4, scaling=scaling), change)
    course.run()
    return course


def with_samples(shown: Any, **samples: Any) -> Any:
    return shown._replace(sample=replace(shown.sample, **samples))


def aged(some: Any) -> Any:
    return {name: one and replace(one, taken_at=one.taken_at - 30.0) for name, one in some.items()}


def with_more(some: Any, more: int) -> Any:
    """The same, who have counted so many requests more, all of them before they were first looked at."""
    return {
        name: one and replace(one, counters={**one.counters, "received": one.counters["received"] + more})
        for name, one in some.items()
    }


@pytest.mark.parametrize(
    ("who", "cause"), [("replicas", "HoldingWithoutSamples"), ("gateways", "Stabilizing")]
)
def test_old_samples_hold_everything(build: Any, who: str, cause: str) -> None:
    def change(shown: Any) -> Any:
        is_old = DOUBT[0] <= shown.at < DOUBT[1]
        return with_samples(shown, **{who: aged(getattr(shown.sample, who))}) if is_old else shown

    course = falling(build, change)
    assert course.moves()[0][0] >= DOUBT[1]
    assert course.moves()[0][1:] == (4, 3)
    held = course.between(DOUBT[0] + 30.0, DOUBT[1] - 5.0)
    assert {one.cause for one in held} == {cause}


@pytest.mark.parametrize("has_gateway", [True, False])
def test_counters_that_fall_without_a_restart_are_no_requests(
    build: Any,
    has_gateway: bool,  # noqa: FBT001 - a parameter
) -> None:
    """A million had been served before the first pass; once all who count arrivals tell a thousand less."""

    def changed(fallen_at: float) -> Callable[[Any], Any]:
        def change(shown: Any) -> Any:
            more = 1_000_000 if shown.at < fallen_at else 999_000
            if has_gateway:
                return with_samples(shown, gateways=with_more(shown.sample.gateways, more))
            shown = with_samples(shown, gateways={}, replicas=with_more(shown.sample.replicas, more))
            older = [replace(one, created_at=one.created_at - 3600.0) for one in shown.observed.replicas]
            return shown._replace(observed=replace(shown.observed, replicas=tuple(older)))

        return change

    fallen, whole = (
        build.course(build.steps((300, 1.5)), build.slow(initial_replicas=2), changed(at))
        for at in (60.0, 1e9)
    )
    for course in (fallen, whole):
        course.run()
    most = max(one.replicas for one in whole.decisions)
    assert max(one.replicas for one in fallen.decisions) <= most
    assert max(one.evidence["requests_per_second"] for one in fallen.decisions) < 3.0
    assert min(one.evidence["requests_per_second"] for one in fallen.between(180.0, 300.0)) > 0.7


def test_a_schedule_has_replicas_before_the_crowd_and_lets_them_go_after_it(build: Any) -> None:
    """From two minutes past midnight, for two minutes, at least four; replicas take 20 s to be ready."""
    entry = {"start": "2 0 * * *", "end": "4 0 * * *", "timeZone": "UTC", "minReplicas": 4}
    setting = build.slow(initial_replicas=1, scaling={"schedule": [entry]})
    course = build.course(build.steps((500, 0.4)), setting)
    course.run()
    up, *down = course.moves()
    assert up[1:] == (1, 4)
    assert 120 - 25 <= up[0] <= 120
    ready = [pod.ready_at - BEGIN_SECONDS for pod in course.simulation.run.pods if pod.ready_at]
    assert len(ready) == 4
    assert max(ready) <= 121
    assert [move[1:] for move in down] == [(4, 3), (3, 2), (2, 1)]
    assert down[0][0] >= 240

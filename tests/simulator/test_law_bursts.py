"""Loads that come in groups all the time: applications that ask for several answers at once."""

import random
from typing import Any

import pytest

from headway_simulator.cluster import BEGIN_SECONDS
from headway_simulator.trace import Arrival, Trace

SETTLED_SECONDS = 400.0
TTFT, TPOT = 2000, 120


def groups(per_second: float, mean: float, seconds: float, seed: int) -> Trace:
    """Requests of one size in groups of a geometric size that come by chance (Poisson)."""
    chance, at = random.Random(seed), 0.0
    found: list[Arrival] = []
    while (at := at + chance.expovariate(per_second / mean)) < seconds:
        found.append(Arrival(at, 400, 50))
        while chance.random() > 1.0 / mean:
            found.append(Arrival(at, 400, 50))
    return Trace("groups", tuple(found), seconds)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_of_requests_are_sized_for_before_they_break_the_promise(build: Any, seed: int) -> None:
    """A replica could take the mean rate; a group of it would wait for its own prompts for too long."""
    setting = build.slow(slo={"ttftMilliseconds": TTFT, "tpotMilliseconds": TPOT}, initial_replicas=3)
    course = build.course(groups(2.0, 5.0, 1200.0, seed), setting)
    run = course.run()
    later = [one for one in run.flights if one.arrived_at - BEGIN_SECONDS >= SETTLED_SECONDS]
    assert sum(one.meets(TTFT, TPOT) for one in later) >= 0.95 * len(later)
    assert all(
        2.0 < one.evidence["index_of_groups"] < 20.0 for one in course.between(SETTLED_SECONDS, 1200.0)
    )
    replicas = [one.replicas for one in course.between(SETTLED_SECONDS, 1200.0)]
    assert sum(replicas) / len(replicas) < 4.5

"""The dead band: as wide as the load is unknown."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from tests.operator.law_fleet import CAPACITY, MODEL, Fleet

from headway_operator.slo.capacity import Replica
from headway_operator.slo.dead_band import width
from headway_operator.slo.forecast import Forecast
from headway_operator.slo.predictions import Workload

# Prompts take 50 ms of a replica, answers as long: of both the standard deviation is the mean.
REPLICA = Replica(MODEL, Workload(1000.0, 2e6, 200.0, 1200.0, 0.0), 95.0)


@pytest.mark.parametrize(
    ("per_second", "idc", "seconds"),
    [
        pytest.param(2.5, 1.0, 300.0, id="few requests, of five minutes"),
        pytest.param(10.0, 1.0, 120.0, id="of two"),
        pytest.param(20.0, 1.0, 60.0, id="of one"),
        pytest.param(20.0, 4.0, 60.0, id="that come in bursts"),
    ],
)
def test_it_follows_from_what_chance_makes_of_the_rate_and_of_the_work(
    per_second: float, idc: float, seconds: float
) -> None:
    rate, work = idc / (120.0 * per_second), 1.5 / (seconds * per_second)
    assert width(Forecast(per_second, 0.0, idc), REPLICA) == pytest.approx(1.3 * sqrt(rate + work), rel=1e-6)


def test_prompts_of_all_lengths_make_it_wider() -> None:
    load, odd = Forecast(20.0, 20.0, 1.0), replace(REPLICA.workload, prompt_square=9e6)
    assert width(load, replace(REPLICA, workload=odd)) > 1.2 * width(load, REPLICA)


@pytest.mark.parametrize(("per_second", "want"), [(0.0, 0.1), (0.2, 0.1), (500.0, 0.03)])
def test_it_has_bounds(per_second: float, want: float) -> None:
    assert width(Forecast(per_second, per_second, 1.0), REPLICA) == want


def test_of_a_large_fleet_the_first_goes_sooner(build: Any) -> None:
    """At a share of what one replica fewer can do, bursts included, that leaves a small fleet in doubt."""

    def is_enough(ready: int, idle_share: float) -> bool:
        fleet = Fleet(build, ready, (1.0 - idle_share) * (ready - 1) * CAPACITY)
        return fleet.decide()[0].evidence["recommended_replicas"] < ready

    assert is_enough(40, 0.05)
    assert not is_enough(4, 0.05)

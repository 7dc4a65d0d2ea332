"""A queue in which the late yield: what is told of it, and what comes of one that is simulated."""

import random
from math import inf

import pytest

from headway_operator.slo.late_queue import late_of_queue
from headway_operator.slo.lognormal import deviations_of, quantile, share_above

NUM_REQUESTS = 200_000


def late_share(rate: float, served: float, patience: float) -> float:
    """Of requests one after another, who only begin to wait where it is not in vain."""
    chance = random.Random(f"{rate} {served} {patience}")
    num_late, wait = 0, 0.0
    for _ in range(NUM_REQUESTS):
        wait = max(0.0, wait - chance.expovariate(rate))
        if wait > patience:
            num_late += 1
        else:
            wait += chance.expovariate(served)
    return num_late / NUM_REQUESTS


@pytest.mark.parametrize("load", [0.7, 0.95, 1.0, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("patience", [0.1, 0.5, 5.0])
def test_as_many_are_late_as_of_a_queue_that_is_simulated(load: float, patience: float) -> None:
    told = late_of_queue(6.0 * load, 6.0, patience)
    assert told == pytest.approx(late_share(6.0 * load, 6.0, patience), abs=0.01)


def test_who_has_time_without_end_is_never_late_and_who_is_not_served_always() -> None:
    assert late_of_queue(6.0, 5.0, inf) == 0.0
    assert late_of_queue(0.0, 0.0, 1.0) == 0.0
    assert late_of_queue(6.0, 0.0, 1.0) == 1.0


def test_long_waits_break_nothing() -> None:
    """All beyond what is served are late then."""
    assert late_of_queue(10.0, 5.0, 1e6) == pytest.approx(0.5)
    assert late_of_queue(5.0, 10.0, 1e6) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("percent", [1.0, 50.0, 95.0, 99.5])
@pytest.mark.parametrize("variance", [1e-6, 4.0, 900.0])
def test_beyond_a_percentile_lies_what_it_leaves(percent: float, variance: float) -> None:
    value = quantile(20.0, variance, deviations_of(percent))
    assert share_above(20.0, variance, value) == pytest.approx(1.0 - percent / 100.0)


@pytest.mark.parametrize(
    ("mean", "variance", "value", "share"),
    [(20.0, 0.0, 19.0, 1.0), (20.0, 0.0, 21.0, 0.0), (0.0, 0.0, 1.0, 0.0), (20.0, 4.0, 0.0, 1.0)],
)
def test_what_does_not_vary_is_above_or_is_not(
    mean: float, variance: float, value: float, share: float
) -> None:
    assert share_above(mean, variance, value) == share

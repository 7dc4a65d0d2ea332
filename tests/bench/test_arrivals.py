"""Arrival processes: their rates and how they vary, by fixed seeds."""

import itertools
import math

import numpy
import pytest

from headway_bench.arrivals import ArrivalKind, RateSegment, arrival_times, steady
from headway_bench.workload import random_stream


def first(count: int, rate: float, kind: ArrivalKind, burstiness: float = 1.0) -> list[float]:
    times = arrival_times(steady(rate), kind, burstiness, random_stream(7))
    return list(itertools.islice(times, count))


@pytest.mark.parametrize(
    ("kind", "burstiness", "want_variation"),
    [("poisson", 1.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_process(
    kind: ArrivalKind, burstiness: float, want_variation: float
) -> None:
    gaps = numpy.diff(first(40_000, 8.0, kind, burstiness))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(want_variation, rel=0.03)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    counts = numpy.bincount(numpy.asarray(first(40_000, 20.0, "poisson")).astype(int))[:1900]
    assert counts.mean() == pytest.approx(20, rel=0.03)
    assert counts.var() == pytest.approx(20, rel=0.1)


def test_constant_arrivals_begin_at_once_and_keep_their_distance() -> None:
    assert first(5, 4.0, "constant") == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_the_same_seed_gives_the_same_times() -> None:
    assert first(50, 3.0, "gamma", 0.5) == first(50, 3.0, "gamma", 0.5)


def test_a_ramp_sends_half_of_what_the_full_rate_would() -> None:
    times = arrival_times(steady(10.0, 10.0), "constant", 1.0, random_stream(0))
    seen = list(itertools.takewhile(lambda at: at < 12, times))
    # Under a rate of t requests/s, the n-th is due when t^2 / 2 reaches n.
    assert seen[:51] == pytest.approx([math.sqrt(2 * n) for n in range(51)])
    assert seen[51:] == pytest.approx([10 + n / 10 for n in range(1, 20)])


def test_rates_by_window_are_kept_and_an_idle_window_stays_empty() -> None:
    segments = (
        RateSegment(0, 100, 20, 20),
        RateSegment(100, 150, 0, 0),
        RateSegment(150, 250, 60, 60, burstiness=4.0),
    )
    times = numpy.asarray(list(arrival_times(segments, "gamma", 1.0, random_stream(3))))
    assert (numpy.diff(times) >= 0).all()
    assert ((times >= 100) & (times < 150)).sum() == 0
    assert (times < 100).sum() == pytest.approx(2000, rel=0.06)
    late = times[times >= 150]
    assert len(late) == pytest.approx(6000, rel=0.03)
    gaps = numpy.diff(late)
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert times[-1] < 250


def test_an_infinite_rate_makes_everything_due_at_once() -> None:
    assert first(3, math.inf, "poisson") == [0, 0, 0]

"""Percentiles and their intervals, against tables and by simulation."""

import numpy
import pytest

from headway_bench.percentiles import (
    describe,
    describe_weighted,
    nearest_rank,
    rank_interval,
    wilson_share,
)
from headway_bench.workload import random_stream


@pytest.mark.parametrize(
    ("count", "percent", "want"),
    [
        (1, 50, 1),
        (2, 50, 1),
        (3, 50, 2),
        (100, 95, 95),
        (100, 99, 99),
        (101, 99, 100),
        (20, 95, 19),
        (7, 100, 7),
    ],
)
def test_a_percentile_is_the_nearest_rank(count: int, percent: int, want: int) -> None:
    assert nearest_rank(count, percent) == want


@pytest.mark.parametrize(
    ("count", "percent", "want"),
    [
        # Binomial tables: e.g. of 20 values the 6th and the 15th enclose the median at 95.9%.
        (20, 50, (6, 15)),
        (100, 50, (40, 61)),
        (10, 50, (2, 9)),
        (5, 50, (None, None)),
        (6, 50, (1, 6)),
        (10, 99, (9, None)),
        (1000, 99, (983, 997)),
    ],
)
def test_intervals_are_those_of_the_binomial_tables(
    count: int, percent: int, want: tuple[int | None, int | None]
) -> None:
    assert rank_interval(count, percent, 0.95) == want


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = random_stream(5)
    truth = {50: 1.0, 95: float(numpy.exp(1.6448536))}
    held = dict.fromkeys(truth, 0)
    for _ in range(600):
        found = describe(random.lognormal(0, 1, size=80).tolist(), (50, 95), 0.9)
        assert found is not None
        for percent, value in truth.items():
            estimate = found.percentiles[percent]
            low = -numpy.inf if estimate.low is None else estimate.low
            high = numpy.inf if estimate.high is None else estimate.high
            held[percent] += bool(low <= value <= high)
    assert all(0.88 < each / 600 < 0.98 for each in held.values()), held


def test_values_are_described_as_by_hand() -> None:
    found = describe([4.0, 1.0, 3.0, 2.0, 10.0], (50, 99), 0.95)
    assert found is not None
    assert (found.count, found.mean, found.minimum, found.maximum) == (5, 4.0, 1.0, 10.0)
    assert (found.percentiles[50].value, found.percentiles[99].value) == (3.0, 10.0)
    assert found.percentiles[99].high is None
    assert describe([], (50,), 0.95) is None


def test_weights_count_as_often_as_they_say() -> None:
    values, weights = numpy.array([5.0, 1.0, 9.0]), numpy.array([2.0, 6.0, 2.0])
    found = describe_weighted(
        values, weights, numpy.array([0, 1, 2]), (50, 60, 61, 80, 81), 0.95, random_stream(0)
    )
    assert found is not None
    assert [found.percentiles[p].value for p in (50, 60, 61, 80, 81)] == [1, 1, 5, 5, 9]
    assert found.count == 10
    assert found.mean == pytest.approx((5 * 2 + 1 * 6 + 9 * 2) / 10)


def test_values_that_come_in_runs_are_trusted_less_than_independent_ones() -> None:
    random = random_stream(2)
    means = random.normal(10, 3, size=40)
    values = numpy.repeat(means, 50) + random.normal(0, 0.1, size=2000)
    ones, alone = numpy.ones(2000), numpy.arange(2000)
    runs = describe_weighted(values, ones, numpy.repeat(numpy.arange(40), 50), (50,), 0.95, random_stream(1))
    independent = describe_weighted(values, ones, alone, (50,), 0.95, random_stream(1))
    widths = []
    for found in (runs, independent):
        assert found is not None
        estimate = found.percentiles[50]
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= estimate.value <= estimate.high
        widths.append(estimate.high - estimate.low)
    assert widths[0] > 3 * widths[1]


def test_a_share_has_wilsons_interval() -> None:
    # Wilson 1927; the worked example of 8 in 10 is in every textbook.
    found = wilson_share(8, 10, 0.95)
    assert found.low == pytest.approx(0.4902, abs=1e-4)
    assert found.high == pytest.approx(0.9433, abs=1e-4)
    assert wilson_share(5, 5, 0.95).high == pytest.approx(1.0)

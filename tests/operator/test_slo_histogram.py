"""Percentiles in summed histograms."""

import random

import pytest

from headway_operator.slo import histogram


def counts_of(values: list[float]) -> dict[int, int]:
    return histogram.total({histogram.bucket_of(value): 1} for value in values)


@pytest.mark.parametrize("percent", [50, 90, 95, 99])
def test_percentile_is_within_a_bucket_of_the_exact_one(percent: int) -> None:
    values = [random.Random(7).lognormvariate(5, 1) for _ in range(5000)]
    want = sorted(values)[int(len(values) * percent / 100) - 1]
    got = histogram.percentile(counts_of(values), percent)
    assert got == pytest.approx(want, rel=0.12)


def test_percentile_of_the_sum_is_not_the_mean_of_percentiles() -> None:
    fast, slow = counts_of([10.0] * 990), counts_of([1000.0] * 10)
    got = histogram.percentile(histogram.total((fast, slow)), 95)
    assert got is not None
    assert got < 12


def test_interpolates_inside_the_bucket() -> None:
    bucket = histogram.bucket_of(100.0)
    low, high = histogram.EDGES[bucket - 1], histogram.EDGES[bucket]
    assert histogram.percentile({bucket: 4}, 50) == pytest.approx((low + high) / 2)
    assert histogram.percentile({bucket: 4}, 100) == pytest.approx(high)


def test_nothing_counted_has_no_percentile_and_values_above_all_edges_the_last_edge() -> None:
    assert histogram.percentile({}, 95) is None
    assert histogram.percentile({105: 3}, 95) == histogram.EDGES[-1]


def test_an_edge_that_went_through_text_stays_in_its_bucket() -> None:
    for bucket, edge in enumerate(histogram.EDGES):
        assert histogram.bucket_of(float(f"{edge:.10g}")) == bucket
        assert histogram.bucket_of(edge * 1.001) == bucket + 1


def test_counts_between_other_edges_go_where_their_upper_edge_lies() -> None:
    got = histogram.on_grid((50.0, 100.0), (1, 2, 3))
    want = {histogram.bucket_of(50.0): 1, histogram.bucket_of(100.0): 2, 105: 3}
    assert {bucket: count for bucket, count in enumerate(got) if count} == want


def test_counts_between_our_edges_stay_what_they_are() -> None:
    counts = tuple(range(106))
    through_text = tuple(float(f"{edge:.10g}") for edge in histogram.EDGES)
    assert histogram.on_grid(tuple(1.0 * 1.12**i for i in range(105)), counts) == counts
    assert histogram.on_grid(through_text, counts) == counts

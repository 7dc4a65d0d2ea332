"""Percentiles and how far to trust them; knows nothing of what the values are.

A percentile is the smallest value that at least so many percent of the values do not exceed (nearest rank).

Its interval, for values that each stand for one request, is made of two order statistics chosen by the
binomial distribution (Conover, Practical Nonparametric Statistics, 3.2): no shape is assumed and nothing is
random. An end that so few values cannot bound is None. Inter-token times come in runs, many to a request, and
are not independent; theirs is a percentile bootstrap over whole requests. Shares have Wilson's interval.

All of them take requests as independent of each other. Under a load near a server's limit they are not: the
intervals are then too narrow, and repeating the run says more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]
_MOST_RESAMPLES = 1000
_FEWEST_RESAMPLES = 100
_BOOTSTRAP_WORK = 100_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval; an end that cannot be told is None."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is reported of one kind of value. `percentiles` by percent; `method` made their intervals."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[int, Estimate]
    method: str


def nearest_rank(count: int, percent: float) -> int:
    """The rank, from 1, of a percentile among `count` ordered values."""
    return min(count, max(1, math.ceil(count * percent / 100 - 1e-9)))


def rank_interval(count: int, percent: float, confidence: float) -> tuple[int | None, int | None]:
    """The ranks, from 1, that enclose the true percentile with at least this confidence."""
    tail = (1 - confidence) / 2
    log_factorial = numpy.concatenate([[0.0], numpy.cumsum(numpy.log(numpy.arange(1, count + 1)))])
    k = numpy.arange(count + 1)
    share = percent / 100
    log_pmf = (
        log_factorial[count]
        - log_factorial[k]
        - log_factorial[count - k]
        + k * math.log(share)
        + (count - k) * math.log1p(-share)
    )
    at_most = numpy.cumsum(numpy.exp(log_pmf))  # P(B <= k): k values lie below the true percentile
    low = int(numpy.searchsorted(at_most, tail, side="right"))
    high = int(numpy.searchsorted(at_most, 1 - tail, side="left")) + 1
    return (low if low >= 1 else None), (high if high <= count else None)


def describe(values: Sequence[float], percents: Sequence[int], confidence: float) -> Distribution | None:
    """The distribution of values that each stand for one request; None when there are none."""
    if not values:
        return None
    ordered = numpy.sort(numpy.asarray(values, dtype=numpy.float64))
    percentiles = {}
    for percent in percents:
        low, high = rank_interval(len(ordered), percent, confidence)
        percentiles[percent] = Estimate(
            float(ordered[nearest_rank(len(ordered), percent) - 1]),
            None if low is None else float(ordered[low - 1]),
            None if high is None else float(ordered[high - 1]),
        )
    return Distribution(
        len(ordered),
        float(ordered.mean()),
        float(ordered[0]),
        float(ordered[-1]),
        percentiles,
        "order statistics",
    )


def describe_weighted(
    values: Floats,
    weights: Floats,
    clusters: NDArray[numpy.int64],
    percents: Sequence[int],
    confidence: float,
    random: numpy.random.Generator,
) -> Distribution | None:
    """The distribution of weighted values; those with one number in `clusters` come from one request."""
    if len(values) == 0:
        return None
    order = numpy.argsort(values, kind="stable")
    values, weights, clusters = values[order], weights[order], clusters[order]
    num_clusters = int(clusters.max()) + 1
    num_resamples = max(_FEWEST_RESAMPLES, min(_MOST_RESAMPLES, _BOOTSTRAP_WORK // len(values)))
    resampled = numpy.empty((num_resamples, len(percents)))
    for row in range(num_resamples):
        times_drawn = numpy.bincount(random.integers(num_clusters, size=num_clusters), minlength=num_clusters)
        resampled[row] = _weighted_percentiles(values, weights * times_drawn[clusters], percents)
    tail = 100 * (1 - confidence) / 2
    lows = numpy.nanpercentile(resampled, tail, axis=0)
    highs = numpy.nanpercentile(resampled, 100 - tail, axis=0)
    found = _weighted_percentiles(values, weights, percents)
    return Distribution(
        round(float(weights.sum())),
        float(numpy.average(values, weights=weights)),
        float(values[0]),
        float(values[-1]),
        {
            percent: Estimate(float(found[i]), float(lows[i]), float(highs[i]))
            for i, percent in enumerate(percents)
        },
        f"bootstrap over requests, {num_resamples} resamples",
    )


def wilson_share(num_good: int, count: int, confidence: float) -> Estimate:
    """A share with its interval; `count` must not be 0."""
    z = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    share = num_good / count
    scale = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    reach = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Estimate(share, max(0.0, centre - reach), min(1.0, centre + reach))


def _weighted_percentiles(ordered: Floats, weights: Floats, percents: Sequence[int]) -> Floats:
    cumulated = numpy.cumsum(weights)
    whole = cumulated[-1]
    if whole == 0:
        return numpy.full(len(percents), numpy.nan)
    wanted = numpy.asarray(percents) / 100 * whole * (1 - 1e-12)
    found: Floats = ordered[
        numpy.minimum(numpy.searchsorted(cumulated, wanted, side="left"), len(ordered) - 1)
    ]
    return found

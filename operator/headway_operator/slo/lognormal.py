"""The lognormal distribution that a latency with a mean and a variance is taken to have."""

from functools import lru_cache
from math import exp, log, sqrt
from statistics import NormalDist


# Percentiles that promises are sized for move with each pass (`sizing.aimed_percent`).
@lru_cache(maxsize=256)
def deviations_of(percent: float) -> float:
    """Of the normal distribution, from its median to a percentile."""
    return NormalDist().inv_cdf(percent / 100.0)


def quantile(mean: float, variance: float, deviations: float) -> float:
    """What lies so many `deviations` above the median, of the logarithm; 0 for no mean."""
    if mean <= 0.0:
        return 0.0
    square = log(1.0 + variance / mean**2)
    return mean * exp(deviations * sqrt(square) - square / 2.0)


def share_above(mean: float, variance: float, value: float) -> float:
    """How much of it is more than a value."""
    if value <= 0.0 or mean <= 0.0:
        return 1.0 if mean > 0.0 else 0.0
    square = log(1.0 + variance / mean**2)
    if square <= 0.0:
        return 1.0 if mean > value else 0.0
    return 1.0 - NormalDist().cdf((log(value / mean) + square / 2.0) / sqrt(square))

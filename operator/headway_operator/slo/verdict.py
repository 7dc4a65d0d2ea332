"""What a count of misses allows to say about a promise, at 90% one-sided confidence.

The promise "percentile P of requests meet the target" is a bound q = 1 - P/100 on the share of misses. With m
misses among n requests, exact binomial tails decide (Clopper and Pearson 1934, one side):

    met       P(X <= m | n, q) <= 0.10: so few misses would be rare if the true share were q or more
    violated  P(X >= m | n, q) <= 0.10: so many misses would be rare if the true share were q or less

For P95 that is: met with at most 0 misses of 59, 2 of 124, 5 of 200, 14 of 400; violated from 3 of 20, 6 of
59, 10 of 124, 15 of 200, 27 of 400.
"""

from math import exp, lgamma, log
from typing import Literal

Verdict = Literal["met", "violated", "unknown"]

ERROR_PROBABILITY = 0.10
# One or two slow requests (the first after a start) are no reason to act, whatever the tail says of them.
LEAST_MISSES = 3
# What adds no more than this share to a probability is left out of it.
NEGLIGIBLE = 1e-15


def verdict(met: int, missed: int, percentile: int) -> Verdict:
    """Judge `missed` among `met + missed` requests against the promise."""
    num_requests = met + missed
    if num_requests == 0:
        return "unknown"
    share = 1.0 - percentile / 100.0
    # P(X <= m) + P(X >= m) > 1, so at most one of the two tails can be small.
    if missed <= num_requests * share:
        return "met" if _at_most(missed, num_requests, share) <= ERROR_PROBABILITY else "unknown"
    if missed < LEAST_MISSES:
        return "unknown"
    # As many misses at least are as few at most that are none.
    at_least = _at_most(met, num_requests, 1.0 - share)
    return "violated" if at_least <= ERROR_PROBABILITY else "unknown"


def _at_most(most: int, num_requests: int, share: float) -> float:
    """P(X <= most) for X binomial(num_requests, share) and most no more than its mean.

    From `most` down each is less likely than the one before, so that the sum ends with what no longer adds to
    it: some standard deviations on, however many requests there are.
    """
    found = exactly = _exactly(most, num_requests, share)
    odds = (1.0 - share) / share
    for k in range(most, 0, -1):
        exactly *= k / (num_requests - k + 1) * odds
        if exactly <= NEGLIGIBLE * found:
            break
        found += exactly
    return min(1.0, found)


def _exactly(k: int, num_requests: int, share: float) -> float:
    # In logarithms: the factors of a large window overflow and underflow long before their product does.
    combinations = lgamma(num_requests + 1) - lgamma(k + 1) - lgamma(num_requests - k + 1)
    return exp(combinations + k * log(share) + (num_requests - k) * log(1.0 - share))

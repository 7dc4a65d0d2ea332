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


def verdict(met: int, missed: int, percentile: int) -> Verdict:
    """Judge `missed` among `met + missed` requests against the promise."""
    num_requests = met + missed
    if num_requests == 0:
        return "unknown"
    share = 1.0 - percentile / 100.0
    # P(X <= m) + P(X >= m) > 1, so at most one of the two tails can be small.
    if missed <= num_requests * share:
        return "met" if _at_most(missed, num_requests, share) <= ERROR_PROBABILITY else "unknown"
    at_least = 1.0 - _at_most(missed - 1, num_requests, share)
    return "violated" if missed >= LEAST_MISSES and at_least <= ERROR_PROBABILITY else "unknown"


def _at_most(misses: int, num_requests: int, share: float) -> float:
    """P(X <= misses) for X binomial(num_requests, share)."""
    if misses < 0:
        return 0.0
    return min(1.0, sum(_exactly(k, num_requests, share) for k in range(misses + 1)))


def _exactly(k: int, num_requests: int, share: float) -> float:
    # In logarithms: the factors of a large window overflow and underflow long before their product does.
    combinations = lgamma(num_requests + 1) - lgamma(k + 1) - lgamma(num_requests - k + 1)
    return exp(combinations + k * log(share) + (num_requests - k) * log(1.0 - share))

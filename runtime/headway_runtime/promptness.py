"""Until when a request that waits can still be answered in time. No clock.

A first token that has come too late to count is worth no less for coming later, while another one may still
be in time: under a load that is more than there are replicas for, an order of arrival makes everybody late, and
one in which the late yield only those who are too many.
"""

from math import sqrt

# What first tokens took counts for about so many requests.
MEMORY = 32
DEVIATIONS = 2.0
# However long prompts take, a request is not late before so much of the time that it has.
LEAST_SHARE = 0.5


class Promptness:
    """target_seconds: from a request's receipt to its first token; None: no request is ever late."""

    __slots__ = ("_mean", "_square", "target_seconds")

    def __init__(self) -> None:
        self.target_seconds: float | None = None
        self._mean = self._square = 0.0

    def observe(self, prefill_seconds: float) -> None:
        """A request's first token came so long after it was scheduled first."""
        self._mean += (prefill_seconds - self._mean) / MEMORY
        self._square += (prefill_seconds**2 - self._square) / MEMORY

    def most_waiting_seconds(self) -> float | None:
        """How long a request may wait to be scheduled, and get its first token in time; None: for ever."""
        target = self.target_seconds
        if target is None:
            return None
        spread = sqrt(max(0.0, self._square - self._mean**2))
        return max(LEAST_SHARE * target, target - self._mean - DEVIATIONS * spread)

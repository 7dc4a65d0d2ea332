"""Which of those that wait can no longer be answered in time. No clock.

A first token that has come too late to count is worth no less for coming later, while another one may still
be in time. So, under more load than can be served, the order of arrival makes everybody late; an order in
which the late yield, only as many as are too many.
"""

from collections import OrderedDict
from collections.abc import Iterator
from math import sqrt

from headway_runtime.config import Targets
from headway_runtime.sequence import Sequence

# What first tokens took counts for about so many requests.
MEMORY = 32
DEVIATIONS = 2.0
# However long prompts take, a request is not late before so much of the time that it has.
LEAST_SHARE = 0.5


class Promptness:
    """Knows who waits for its first step, and how long a first token takes from there.

    late_yield_seconds: how far those found late are put back; 0: nobody is looked for.
    """

    def __init__(self, late_yield_seconds: float) -> None:
        self.late_yield_seconds = late_yield_seconds
        self._target_seconds: float | None = None
        self._mean = self._square = 0.0
        # By arrival; from an ordered dict any is taken at once.
        self._in_time: OrderedDict[str, Sequence] = OrderedDict()
        self._late: set[str] = set()

    @property
    def num_late(self) -> int:
        """Of those that wait: found late."""
        return len(self._late)

    def is_late(self, sequence: Sequence) -> bool:
        """Whether this one was found late, and waits for its first step."""
        return sequence.request.request_id in self._late

    def aim_at(self, targets: Targets) -> None:
        """Judge by this TTFT target from now on, of those that wait, too; without one nobody is late.

        Those found late by another one stay so.
        """
        target = targets.ttft_milliseconds
        self._target_seconds = None if target is None else target / 1000.0
        if target is None:
            self._late.clear()

    def observe(self, prefill_seconds: float) -> None:
        """A request's first token came so long after it was scheduled first."""
        self._mean += (prefill_seconds - self._mean) / MEMORY
        self._square += (prefill_seconds**2 - self._square) / MEMORY

    def begin(self, sequence: Sequence) -> None:
        """It waits from now on."""
        self._in_time[sequence.request.request_id] = sequence

    def end(self, request_id: str) -> None:
        """It waits no more; a request that was found late, or never waited, may be named, too."""
        self._in_time.pop(request_id, None)
        self._late.discard(request_id)

    def is_any_late(self, now: float) -> bool:
        """Whether `take_late` would tell of one."""
        if self._target_seconds is None or not self.late_yield_seconds or not self._in_time:
            return False
        first = next(iter(self._in_time.values()))
        return now - first.request.received_at > self._most_waiting_seconds(self._target_seconds)

    def take_late(self, now: float) -> Iterator[Sequence]:
        """Those that are late by now, each told once."""
        while self.is_any_late(now):
            _, sequence = self._in_time.popitem(last=False)
            self._late.add(sequence.request.request_id)
            yield sequence

    def _most_waiting_seconds(self, target: float) -> float:
        spread = sqrt(max(0.0, self._square - self._mean**2))
        return max(LEAST_SHARE * target, target - self._mean - DEVIATIONS * spread)

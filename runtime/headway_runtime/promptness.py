"""Which of those that wait can no longer be answered in time. No clock.

A first token that has come too late to count is worth no less for coming later, while another one may still
be in time. So, under more load than can be served, the order of arrival makes everybody late; an order in
which the late yield, only as many as are too many. Whether one is late hangs on its own prompt: what a short
one still has time for, a long one has not, and to begin that one would only make the next ones late.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import sqrt

from headway_runtime.config import Targets
from headway_runtime.prompt_cost import EVEN, PromptCost
from headway_runtime.sequence import Sequence

# What first tokens took counts for about so many requests.
MEMORY = 32
# Beyond what a prompt of its cost takes, so many standard deviations of what others took beyond that.
DEVIATIONS = 1.0
# However long its prompt takes, a request is not late before so much of the time that it has.
LEAST_SHARE = 0.25
# Those who wait are looked at anew once prompts take so much more or less than when that was done last.
WORTHWHILE = 0.1


class Promptness:
    """Knows who waits for its first step, and how long a first token takes from there.

    late_yield_seconds: how far those found late are put back; 0: nobody is looked for. cost: of prompts.
    """

    def __init__(self, late_yield_seconds: float, cost: PromptCost = EVEN) -> None:
        self.late_yield_seconds = late_yield_seconds
        self._cost = cost
        self._target_seconds: float | None = None
        # Moving means: of the seconds until a first token came, of the cost of the whole prompts that it came
        # for, and of the square of what these seconds were beyond what such a cost takes.
        self._seconds = self._prompt = self._square = 0.0
        # What a unit of cost takes, and the spread, as those who wait were looked at with.
        self._known = (0.0, 0.0)
        self._in_time: dict[str, Sequence] = {}
        # A heap, by when each must begin: of those in time, and of some who have left.
        self._begins: list[tuple[float, int, Sequence]] = []
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
        self._look_anew()

    def observe(self, sequence: Sequence, prefill_seconds: float) -> None:
        """A request's first token came so long after it was scheduled first."""
        cost = self._cost_of(sequence)
        self._seconds += (prefill_seconds - self._seconds) / MEMORY
        self._prompt += (cost - self._prompt) / MEMORY
        per_cost = self._seconds / self._prompt
        self._square += ((prefill_seconds - per_cost * cost) ** 2 - self._square) / MEMORY
        spread = sqrt(self._square)
        for known, new in zip(self._known, (per_cost, spread), strict=True):
            if abs(new - known) > WORTHWHILE * known:
                self._known = (per_cost, spread)
                self._look_anew()
                return

    def begin(self, sequence: Sequence) -> None:
        """It waits from now on."""
        self._in_time[sequence.request.request_id] = sequence
        if (target := self._wanted) is not None:
            heappush(self._begins, (self._latest(sequence, target), sequence.rank[1], sequence))

    def end(self, request_id: str) -> None:
        """It waits no more; a request that was found late, or never waited, may be named, too."""
        self._in_time.pop(request_id, None)
        self._late.discard(request_id)

    def is_any_late(self, now: float) -> bool:
        """Whether `take_late` would tell of one."""
        while self._begins:
            latest, _, sequence = self._begins[0]
            if self._in_time.get(sequence.request.request_id) is sequence:
                return now > latest
            heappop(self._begins)
        return False

    def take_late(self, now: float) -> Iterator[Sequence]:
        """Those that are late by now, each told once."""
        while self.is_any_late(now):
            _, _, sequence = heappop(self._begins)
            del self._in_time[sequence.request.request_id]
            self._late.add(sequence.request.request_id)
            yield sequence

    def _look_anew(self) -> None:
        target = self._wanted
        waiting = () if target is None else self._in_time.values()
        self._begins = [(self._latest(one, target or 0.0), one.rank[1], one) for one in waiting]
        heapify(self._begins)

    @property
    def _wanted(self) -> float | None:
        """The target in seconds; None where nobody is looked for."""
        return self._target_seconds if self.late_yield_seconds else None

    def _latest(self, sequence: Sequence, target: float) -> float:
        """When it must begin to be in time."""
        per_cost, spread = self._known
        takes = per_cost * self._cost_of(sequence) + DEVIATIONS * spread
        return sequence.request.received_at + max(LEAST_SHARE * target, target - takes)

    def _cost_of(self, sequence: Sequence) -> int:
        """Of the whole prompt: what of it is cached is not known while it waits."""
        return self._cost.of(0, len(sequence.request.prompt_token_ids))

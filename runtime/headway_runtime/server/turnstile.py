"""Lets a few pass at a time, so that a crowd that arrives at once does not hold up everybody else.

To begin a request takes the event loop some half a millisecond in one piece: parsing, routing, checking,
tokenizing. 256 of them that arrive together would take a tenth of a second before the loop looks at anything
else: at tokens that are ready, at a probe that asks for /health. Waking 256 streams for their first or last
tokens takes a third of that. Here they wait in line, and between one handful and the next the loop
goes round.

In one round the loop accepts a few connections (`listening.doors`). Were a handful of requests begun in each,
a probe's connection would wait until most that came before it have begun. So those in line make way while
connections come: at first nobody passes, then one in each round.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Does it, unless it has become needless; returns whether it did.
Passage = Callable[[], bool]

# A connection accepted in one round asks for something in the next.
ROUNDS_OF_WAY = 2
# How long nobody passes at a stretch, and how long one does in each round after that. A process that has just
# begun needs 0.1 to 0.15 ms for each connection, so a crowd of 256 is accepted within it; with 0.025 its last
# ones came behind requests, half a millisecond each (docs/log.md).
LONGEST_WAY_SECONDS = 0.04


class Turnstile:
    """Lives in the event loop's thread. First come, first served.

    per_turn: how many pass in one round. clock: seconds.
    """

    def __init__(self, per_turn: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_turn = per_turn
        self._clock = clock
        self._num_passed = 0
        self._is_turning = False
        self._line: deque[Passage] = deque()
        self._rounds_of_way = 0
        self._way_ends_at = -LONGEST_WAY_SECONDS

    async def enter(self) -> None:
        """Return when it is one's turn, at once while few come."""
        if self._passes_at_once():
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(lambda: _let_in(place))
        await place

    def run(self, passage: Passage) -> None:
        """Call `passage` when it is its turn, at once while few come."""
        if not self._passes_at_once():
            self._line.append(passage)
        elif not passage():
            self._num_passed -= 1

    def make_way(self) -> None:
        """Let hardly anybody pass in this round and the next: something else is to be done first."""
        now = self._clock()
        if now >= self._way_ends_at + LONGEST_WAY_SECONDS:
            self._way_ends_at = now + LONGEST_WAY_SECONDS
        self._rounds_of_way = ROUNDS_OF_WAY
        self._start_turning()

    def _start_turning(self) -> None:
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _passes_at_once(self) -> bool:
        self._start_turning()
        if self._num_passed >= self._per_turn or self._line or self._rounds_of_way:
            return False
        self._num_passed += 1
        return True

    def _turn(self) -> None:
        """The loop has gone round: let the next ones pass."""
        if not (self._line or self._num_passed or self._rounds_of_way):
            self._is_turning = False
            return
        # First of all: one passage that fails must not keep all others waiting.
        asyncio.get_running_loop().call_soon(self._turn)
        self._num_passed = 0
        self._rounds_of_way = max(0, self._rounds_of_way - 1)
        allowed = self._per_turn
        if self._rounds_of_way:
            allowed = 0 if self._clock() < self._way_ends_at else 1
        while self._line and self._num_passed < allowed:
            self._num_passed += self._line.popleft()()


def _let_in(place: asyncio.Future[None]) -> bool:
    if place.done():  # whoever waited was cancelled
        return False
    place.set_result(None)
    return True

"""Lets a few requests in at a time, so that a crowd that arrives at once does not hold up everybody else.

To begin a request takes the event loop some half a millisecond in one piece: routing, checking, tokenizing.
256 of them that arrive together would take a tenth of a second before the loop looks at anything else: at
tokens that are ready, at a probe that asks for /health. Here they wait in line, and between one handful and
the next the loop goes round.
"""

import asyncio
from collections import deque

PER_TURN = 4


class Turnstile:
    """Lives in the event loop's thread. First come, first served."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._num_entered = 0
        self._is_turning = False
        self._line: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when it is one's turn, at once while few come."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        if self._num_entered < self._per_turn and not self._line:
            self._num_entered += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._line.append(place)
        await place

    def _turn(self) -> None:
        """The loop has gone round: let the next ones in."""
        self._num_entered = 0
        while self._line and self._num_entered < self._per_turn:
            place = self._line.popleft()
            if not place.done():  # else whoever waited was cancelled
                place.set_result(None)
                self._num_entered += 1
        if self._num_entered:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._is_turning = False

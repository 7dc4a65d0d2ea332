"""When this server may end: what is in flight, whether it is draining, and when draining is over.

Draining refuses nobody. `/ready` fails at once, so that no new work is sent here; what still comes, because
the news has not reached everybody, is served as before, on connections that are closed afterwards. It is
over when nothing is in flight and nobody has asked for anything for a second, or when its time is up.
Counts requests for the model only: probes and scrapes keep no server alive.
"""

import asyncio
from collections.abc import Callable

QUIET_SECONDS = 1.0


class Lifecycle:
    """Lives in the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_in_flight = 0
        self._last_change_at: float | None = None
        self._changed = asyncio.Event()
        self.is_draining = False

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def request_begins(self) -> None:
        self._num_in_flight += 1
        self._note_change()

    def request_ends(self) -> None:
        self._num_in_flight -= 1
        self._note_change()

    async def drain(self, timeout_seconds: float) -> bool:
        """Start draining and return when it is over: True if all work was done, False if time was up."""
        self.is_draining = True
        started_at = self._clock()
        deadline = started_at + timeout_seconds
        while True:
            now = self._clock()
            if self._num_in_flight == 0:
                # A server that nobody ever asked for anything has nobody to wait for.
                quiet_at = (
                    now
                    if self._last_change_at is None
                    else max(self._last_change_at, started_at) + QUIET_SECONDS
                )
                if now >= quiet_at:
                    return True
                wake_at = min(quiet_at, deadline)
            else:
                wake_at = deadline
            if now >= deadline:
                return self._num_in_flight == 0
            self._changed.clear()
            try:
                async with asyncio.timeout(wake_at - now):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def wait_until_idle(self, timeout_seconds: float) -> None:
        """Return when nothing is in flight, or when the time is up."""
        deadline = self._clock() + timeout_seconds
        while self._num_in_flight and (left := deadline - self._clock()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _note_change(self) -> None:
        self._last_change_at = self._clock()
        self._changed.set()

"""Which pass goes on next: places of passes that are under way, and in which order they compute.

Passes wait for pods and for the API server most of the time, so many are under way at once; but each of their
computations holds everything else up, and asyncio lets whoever is ready run in the order of becoming so: an
edit would wait for a computation of every pass that happens to be ready, at every answer that it waits for.
So passes ask (`pace`) before they compute, and in each round of the event loop one of them goes on: of those
that were woken the first, else of those that come by the clock. Everything else, a watch that brings the next
edit, has its turn in between.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from headway_operator.state import ServiceKey


class Turns:
    """Of the passes over all services."""

    def __init__(self, woken: int, by_the_clock: int) -> None:
        """So many passes that were woken may be under way at once, and so many that come by the clock."""
        self._woken = asyncio.Semaphore(woken)
        self._by_the_clock = asyncio.Semaphore(by_the_clock)
        self._urgent: set[ServiceKey] = set()
        self._first: deque[asyncio.Future[None]] = deque()
        self._then: deque[asyncio.Future[None]] = deque()
        self._is_calling = False

    @contextlib.asynccontextmanager
    async def place(self, key: ServiceKey, *, is_woken: bool) -> AsyncIterator[None]:
        """Held during a pass over this service."""
        async with self._woken if is_woken else self._by_the_clock:
            if is_woken:
                self._urgent.add(key)
            try:
                yield
            finally:
                self._urgent.discard(key)

    async def pace(self, key: ServiceKey) -> None:
        """Until the pass over this service may compute."""
        loop = asyncio.get_running_loop()
        called = loop.create_future()
        (self._first if key in self._urgent else self._then).append(called)
        if not self._is_calling:
            self._is_calling = True
            loop.call_soon(self._call)
        await called

    def _call(self) -> None:
        """Call one, and the next in the next round."""
        while waiting := self._first or self._then:
            called = waiting.popleft()
            if not called.done():  # a pass that was cancelled has no turn
                called.set_result(None)
                break
        self._is_calling = bool(self._first or self._then)
        if self._is_calling:
            asyncio.get_running_loop().call_soon(self._call)

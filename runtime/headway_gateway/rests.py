"""Backends that could not be reached: left alone for a while, then tried, until a connection stands."""

import asyncio
from collections.abc import Awaitable, Callable

from headway_gateway.backend import Backend

FIRST_REST_SECONDS = 0.1
LONGEST_REST_SECONDS = 2.0


class Rests:
    """is_known: whether a backend is of the latest list still; others are tried no more. can_connect: to a
    URL; None where nobody can, and a rest is enough. note_back: told of each that is back."""

    def __init__(
        self,
        is_known: Callable[[Backend], bool],
        can_connect: Callable[[str], Awaitable[bool]] | None,
        note_back: Callable[[], None],
    ) -> None:
        self._is_known = is_known
        self._can_connect = can_connect
        self._note_back = note_back
        self._resting: dict[Backend, asyncio.TimerHandle | asyncio.Task[None]] = {}

    def begin(self, backend: Backend) -> None:
        """Twice as long as the last time it needed it."""
        backend.is_suspect = True
        backend.num_late = 0.0
        backend.rest_seconds = min(backend.rest_seconds * 2 or FIRST_REST_SECONDS, LONGEST_REST_SECONDS)
        loop = asyncio.get_running_loop()
        self._resting[backend] = loop.call_later(backend.rest_seconds, self._end, backend)

    def end(self, backend: Backend) -> None:
        """A connection to it stands."""
        self._forget(backend)
        backend.is_suspect = False
        backend.rest_seconds = 0.0
        self._note_back()

    def close(self) -> None:
        """Nobody is tried any more."""
        for backend in [*self._resting]:
            self._forget(backend)

    def _forget(self, backend: Backend) -> None:
        rest = self._resting.pop(backend, None)
        if rest is not None and rest is not asyncio.current_task():
            rest.cancel()

    def _end(self, backend: Backend) -> None:
        if not self._is_known(backend):
            del self._resting[backend]
        elif self._can_connect is None:
            self.end(backend)
        else:
            self._resting[backend] = asyncio.create_task(self._try(backend, self._can_connect))

    async def _try(self, backend: Backend, can_connect: Callable[[str], Awaitable[bool]]) -> None:
        if await can_connect(backend.url):
            self.end(backend)
        else:
            self.begin(backend)

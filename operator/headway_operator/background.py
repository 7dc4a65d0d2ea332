"""Keeps what the operator does beside its passes going: the Lease, the watches, the lists, the keys.

Each of these tasks runs as long as the operator, and handles by itself what it expects. One that ends all the
same, by a defect or in whatever way, is logged with its traceback, counted and begun anew, after a pause that
doubles as long as it keeps ending. `failing_seconds` says since when one has not run through a quiet time, by
which liveness judges: a fresh process may do what this one cannot.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
# A task that has run so long since it was begun anew has recovered; longer than the longest pause.
RECOVERED_SECONDS = 60.0


class Background:
    """The tasks of one operator. clock: seconds, never going back."""

    def __init__(
        self,
        on_restart: Callable[[str], None] = lambda name: None,
        *,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_restart: hears the name of each task that ended and is begun anew."""
        self._on_restart = on_restart
        self._first_pause_seconds = first_pause_seconds
        self._clock = clock
        self._failing_since: dict[str, float] = {}
        self._begun_at: dict[str, float | None] = {}  # None: it has ended, and waits to be begun anew

    def failing_seconds(self) -> float:
        """For how long the task that has failed longest has not recovered; 0 while all are well."""
        now = self._clock()
        failing = [name for name in self._failing_since if not self._has_recovered(name, now)]
        return max((now - self._failing_since[name] for name in failing), default=0.0)

    @contextlib.asynccontextmanager
    async def running(self, work: Callable[[], Awaitable[None]], name: str) -> AsyncIterator[None]:
        """Have `work` run while the block does, which cancels it at its end."""
        task = asyncio.create_task(self._keep(work, name), name=name)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        pause = self._first_pause_seconds
        while True:
            self._begun_at[name] = self._clock()
            try:
                await work()
                error = None
            except Exception as raised:  # noqa: BLE001 - logged with its traceback just below
                error = raised
            now = self._clock()
            if self._has_recovered(name, now):
                self._failing_since.pop(name, None)
                pause = self._first_pause_seconds
            self._failing_since.setdefault(name, now)
            self._begun_at[name] = None
            logger.error("the task %r ended; it begins anew in %g s", name, pause, exc_info=error)
            self._on_restart(name)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _has_recovered(self, name: str, now: float) -> bool:
        begun_at = self._begun_at[name]
        return begun_at is not None and now - begun_at >= RECOVERED_SECONDS

"""Keeps passing over services: one task each, at every wake-up and at least once per interval.

A pass that fails, in whatever way, is logged and counted and the next one comes with the next tick. A service
that is gone ends its task. What a pass does is `reconcile`'s business; who wakes it is the caller's.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from headway_operator.errors import HeadwayOperatorError
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.reconcile import Carried, Outcome, World, reconcile
from headway_operator.spec import Manifest
from headway_operator.state import ServiceKey

logger = logging.getLogger(__name__)

Fetch = Callable[[ServiceKey], Awaitable[Manifest | None]]


class ServiceLoop:
    """The passes over one service."""

    def __init__(
        self,
        world: World,
        key: ServiceKey,
        fetch: Fetch,
        *,
        interval_seconds: float,
        metrics: OperatorMetrics,
        may_act: Callable[[], bool] = lambda: True,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        """fetch: the service as it is now, None when it is gone. may_act: whether to write at all now."""
        self._world = world
        self._key = key
        self._fetch = fetch
        self._interval_seconds = interval_seconds
        self._metrics = metrics
        self._may_act = may_act
        self._on_outcome = on_outcome
        self._wake = asyncio.Event()
        self._carried = Carried()
        self._uid = ""
        self._last_failure = ""
        self.finished_at = time.monotonic()  # of the last pass, whether it succeeded or not

    def wake(self) -> None:
        """Have a pass now, or right after the one in progress."""
        self._wake.set()

    async def run(self) -> None:
        """Pass until the service is gone."""
        while True:
            self._wake.clear()
            # Woken while it was found gone, it may have come back since.
            if self._may_act() and not await self._pass() and not self._wake.is_set():
                return
            self.finished_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval_seconds)

    async def _pass(self) -> bool:
        started_at = time.monotonic()
        try:
            manifest = await self._fetch(self._key)
            if manifest is None or manifest["metadata"].get("deletionTimestamp"):
                return False
            uid = manifest["metadata"].get("uid", "")
            if uid != self._uid:  # another service of the same name: nothing carries over
                self._uid, self._carried = uid, Carried()
            outcome = await reconcile(self._world, manifest, self._carried)
            self._metrics.passed(outcome, time.monotonic() - started_at)
            self._on_outcome(outcome)
        except HeadwayOperatorError as error:
            self._log_failure(error)
            self._metrics.failed(self._key, type(error).__name__)
        except Exception as error:  # noqa: BLE001 - logged with its traceback just below
            # A defect must cost one pass of one service, not the operator.
            self._log_failure(error, exc_info=error)
            self._metrics.failed(self._key, "Unexpected")
        else:
            self._last_failure = ""
        return True

    def _log_failure(self, error: Exception, exc_info: Exception | None = None) -> None:
        """Once, however often it comes back in a row: every tick would."""
        failure = f"{type(error).__name__}: {error}"
        level = logging.DEBUG if failure == self._last_failure else logging.ERROR
        self._last_failure = failure
        logger.log(level, "%s: the pass failed: %s; it is tried again", self._key, failure, exc_info=exc_info)


class ServiceLoops:
    """The loops of all services. `make` builds the loop of a new one, `on_gone` hears of an ended one."""

    def __init__(
        self,
        make: Callable[[ServiceKey], ServiceLoop],
        on_gone: Callable[[ServiceKey], None] = lambda _: None,
    ) -> None:
        self._make = make
        self._on_gone = on_gone
        self._loops: dict[ServiceKey, tuple[ServiceLoop, asyncio.Task[None]]] = {}

    def wake(self, key: ServiceKey) -> None:
        """Have a pass over the service now; begin with it if it is new."""
        if key not in self._loops or self._loops[key][1].done():
            loop = self._make(key)
            task = asyncio.create_task(loop.run(), name=f"service {key}")
            self._loops[key] = (loop, task)
            task.add_done_callback(functools.partial(self._ended, key))
        self._loops[key][0].wake()

    def __len__(self) -> int:
        return len(self._loops)

    def oldest_pass_seconds(self) -> float:
        """How long ago the service that waits longest had its last pass; 0 without services."""
        now = time.monotonic()
        return max((now - loop.finished_at for loop, _ in self._loops.values()), default=0.0)

    async def close(self) -> None:
        """End every loop, in the middle of a pass if need be: each step of one may be the last."""
        tasks = [task for _, task in self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: ServiceKey, task: asyncio.Task[None]) -> None:
        if self._loops[key][1] is task:
            del self._loops[key]
            self._on_gone(key)

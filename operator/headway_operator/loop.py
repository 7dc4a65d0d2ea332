"""Keeps passing over services: one task each, at every wake-up and at least once per interval.

A pass that fails, in whatever way, is logged and counted and the next one comes with the next tick. A service
that is gone ends its task. While a service sleeps, its gateways are asked, with the question left open,
whether anybody waits: a pass follows at once when somebody does. What a pass does is the business of
`reconcile`; who wakes it is the caller's. ModelCaches are passed over likewise, by `cache_pass`.

Only so many passes run at once; the others wait for their turn (`turns`), first come first served. Passes
that somebody woke have places of their own: an edit does not queue behind the ticks of a thousand services.
The first intervals of the services are of different lengths, so that those that began together do not stay
together. An interval lies between the times at which passes are due, not between one's end and the next one's
beginning, so that the samples of a busy operator are no further apart; but half of it is rest.
"""

import asyncio
import contextlib
import contextvars
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from typing import Protocol

from headway_operator.errors import (
    HeadwayOperatorError,
    NotLeadingError,
    OtherOperatorError,
    ScrapeError,
)
from headway_operator.operator_log import about
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.spec import Manifest, generation_of
from headway_operator.state import ServiceKey
from headway_operator.turns import Turns

logger = logging.getLogger(__name__)

# Of an interval, between two passes that were not woken.
LEAST_REST = 0.5

Fetch = Callable[[ServiceKey], Awaitable[Manifest | None]]
TakePass = Callable[[Manifest, Carried], Awaitable[Outcome]]


class PassMetrics(Protocol):
    """Hears of passes."""

    def queued(self) -> AbstractContextManager[None]: ...
    def waited(self, seconds: float) -> None: ...
    def passed(self, outcome: Outcome, seconds: float) -> None: ...
    def failed(self, key: ServiceKey, reason: str, seconds: float) -> None: ...


class ServiceLoop:
    """The passes over one service."""

    def __init__(
        self,
        world: World,
        key: ServiceKey,
        fetch: Fetch,
        *,
        interval_seconds: float,
        metrics: PassMetrics,
        may_act: Callable[[], bool] = lambda: True,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
        turns: Turns | None = None,
        take_pass: TakePass | None = None,
    ) -> None:
        """fetch: the service as it is now, None when it is gone. may_act: whether to write at all now.

        turns: of the passes of all services; None bounds them not.
        take_pass: what a pass is, for what is no service.
        """
        self._world = world
        self._key = key
        self._fetch = fetch
        self._interval_seconds = interval_seconds
        self._metrics = metrics
        self._may_act = may_act
        self._on_outcome = on_outcome
        self._turns = turns
        self._take_pass = take_pass
        self._wake = asyncio.Event()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._is_demanded = False
        self._planned_at = time.monotonic()
        self._woken_at: float | None = None
        self._has_passed = False
        self._next_wait_seconds = interval_seconds if turns is None else random.uniform(0, interval_seconds)
        self._carried = Carried()
        self._uid = ""
        self._last_failure = ""
        self.generation = 0  # of the service as the last pass saw it
        self.finished_at = time.monotonic()  # of the last pass, whether it succeeded or not

    def wake(self) -> None:
        """Have a pass now, or right after the one in progress."""
        if self._woken_at is None:
            self._woken_at = time.monotonic()
        self._wake.set()

    async def run(self) -> None:
        """Pass until the service is gone; what fails around a pass costs an interval and no more."""
        is_there = True
        try:
            while is_there:
                try:
                    is_there = await self._go_on()
                except Exception as error:  # noqa: BLE001 - logged with its traceback just below
                    self._log_failure(error, exc_info=error)
                    self._metrics.failed(self._key, "Unexpected", 0.0)
                    await asyncio.sleep(self._interval_seconds)
        finally:
            self._listen(())

    async def _go_on(self) -> bool:
        """One pass, and the wait for the next; False when the service is gone."""
        # At a start everybody is new, and nobody waits for one more than for another.
        is_woken = self._woken_at is not None and self._has_passed
        due_at = self._planned_at if self._woken_at is None else self._woken_at
        self._wake.clear()
        self._woken_at = None
        # Woken while it was found gone, it may have come back since.
        if not self._may_act():
            # Another operator goes on with it; what that learns is in its checkpoint.
            self._rest()
        elif not await self._turn(due_at, is_woken=is_woken) and not self._wake.is_set():
            return False
        self.finished_at, self._has_passed = time.monotonic(), True
        interval, self._next_wait_seconds = self._next_wait_seconds, self._interval_seconds
        self._planned_at = max(due_at + interval, self.finished_at + interval * LEAST_REST)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self._planned_at - self.finished_at)
        return True

    def _rest(self) -> None:
        """Forget and hear nothing while another operator leads."""
        self._carried = Carried()
        self._listen(())

    def _listen(self, addresses: Collection[str]) -> None:
        """Have each of these gateways tell at once when a request waits there, and no others."""
        for address in self._listeners.keys() - set(addresses):
            self._listeners.pop(address).cancel()
        for address in addresses:
            if address not in self._listeners or self._listeners[address].done():
                task = asyncio.create_task(self._await_demand(address), name=f"demand {self._key}")
                self._listeners[address] = task

    async def _await_demand(self, address: str) -> None:
        try:
            while not await self._world.scraper.demand(self._key, address):
                pass
        except ScrapeError as error:
            logger.debug("%s: nobody can tell whether a request waits: %s", self._key, error)
            return  # the next pass asks again
        self._is_demanded = True
        self.wake()

    async def _turn(self, due_at: float, *, is_woken: bool) -> bool:
        """One pass when it is its turn. due_at: when it would have begun with nobody before it."""
        async with contextlib.AsyncExitStack() as stack:
            with self._metrics.queued():
                if self._turns is not None:
                    await stack.enter_async_context(self._turns.place(self._key, is_woken=is_woken))
            self._metrics.waited(max(0.0, time.monotonic() - due_at))
            return await self._pass()

    async def _pass(self) -> bool:
        started_at = time.monotonic()
        try:
            manifest = await self._fetch(self._key)
            if manifest is None or manifest["metadata"].get("deletionTimestamp"):
                return False
            uid = manifest["metadata"].get("uid", "")
            if uid != self._uid:  # another service of the same name: nothing carries over
                self._uid, self._carried = uid, Carried()
            self.generation = generation_of(manifest)
            with about(self._key, self.generation):
                take_pass = self._take_pass or functools.partial(reconcile, self._world)
                outcome = await take_pass(manifest, self._carried)
            self._metrics.passed(outcome, time.monotonic() - started_at)
            # Demand that did not wake the service is not asked for again before the next interval.
            was_demanded, self._is_demanded = self._is_demanded, False
            self._listen(() if was_demanded else outcome.wakers)
            self._on_outcome(outcome)
        except NotLeadingError as error:
            logger.info("%s: the pass ends here: %s", self._key, error)
            self._rest()
        except HeadwayOperatorError as error:
            if isinstance(error, OtherOperatorError):
                self._rest()
            self._log_failure(error)
            self._metrics.failed(self._key, type(error).__name__, time.monotonic() - started_at)
        except Exception as error:  # noqa: BLE001 - logged with its traceback just below
            # A defect must cost one pass of one service, not the operator.
            self._log_failure(error, exc_info=error)
            self._metrics.failed(self._key, "Unexpected", time.monotonic() - started_at)
        else:
            self._last_failure = ""
        return True

    def _log_failure(self, error: Exception, exc_info: Exception | None = None) -> None:
        """Once, however often it comes back in a row: every tick would."""
        failure = f"{type(error).__name__}: {error}"
        level = logging.DEBUG if failure == self._last_failure else logging.ERROR
        self._last_failure = failure
        with about(self._key, self.generation):
            logger.log(
                level, "%s: the pass failed: %s; it is tried again", self._key, failure, exc_info=exc_info
            )


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
        self._is_closing = False
        self._context = contextvars.copy_context()

    def wake(self, key: ServiceKey) -> None:
        """Have a pass over the service now; begin with it if it is new."""
        if key not in self._loops or self._loops[key][1].done():
            loop = self._make(key)
            # Not in the context of whoever brings the news, which holds all that it was brought with.
            task = asyncio.create_task(loop.run(), name=f"service {key}", context=self._context.copy())
            self._loops[key] = (loop, task)
            task.add_done_callback(functools.partial(self._ended, key), context=self._context)
        self._loops[key][0].wake()

    def __len__(self) -> int:
        return len(self._loops)

    def __contains__(self, key: ServiceKey) -> bool:
        return key in self._loops

    def oldest_pass_seconds(self) -> float:
        """How long ago the service that waits longest had its last pass; 0 without services."""
        now = time.monotonic()
        return max((now - loop.finished_at for loop, _ in self._loops.values()), default=0.0)

    async def close(self) -> None:
        """End every loop, in the middle of a pass if need be: each step of one may be the last.

        No service is said to be gone: that is between it and the next operator.
        """
        self._is_closing = True
        tasks = [task for _, task in self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: ServiceKey, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: its loop has ended; the next event begins it anew", key, exc_info=error)
        if self._loops[key][1] is task:
            del self._loops[key]
            if not self._is_closing:
                self._on_gone(key)

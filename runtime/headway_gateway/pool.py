"""Which replica takes the next request, and who waits while none can; owns the counts in flight.

The rule: of the ready backends, the one with the fewest requests of this gateway in flight; among equals the
one picked longest ago, so that a new backend is first in line. A backend that answered 503 moments ago comes
after all others. One that could not be reached is left alone for a while (0.1 s, doubled up to 2 s), then
tried with a single request; it is back for all as soon as a connection is made.

Where no backend can take a request, the request waits in one queue, first in first out: `max_waiting` long at
most and until its own deadline. Backends are assigned at the moment of waking, so nobody overtakes.

Knows nothing of HTTP. Times are seconds of the event loop's clock.
"""

import asyncio
from collections.abc import Collection, Sequence
from types import TracebackType

from headway_gateway.backend import Backend, BackendEntry
from headway_gateway.errors import AnswerError

FIRST_REST_SECONDS = 0.1
LONGEST_REST_SECONDS = 2.0
BUSY_SECONDS = 0.5
RETRY_AFTER_SECONDS = 2


class Lease:
    """The right to send one request to one backend; counted in flight until it is left."""

    __slots__ = ("_is_open", "_is_probe", "_pool", "backend")

    def __init__(self, pool: "BackendPool", backend: Backend, *, is_probe: bool) -> None:
        self.backend = backend
        self._pool = pool
        self._is_probe = is_probe
        self._is_open = True

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def mark_reached(self) -> None:
        """A connection to the backend stands."""
        backend = self.backend
        if backend.is_suspect:
            backend.is_suspect = backend.is_resting = backend.is_probed = False
            backend.rest_seconds = 0.0
            self._is_probe = False
            self._pool.wake_waiting()

    def mark_unreachable(self) -> None:
        """No connection could be made: let it rest. Of many that fail together only the first counts."""
        if not self.backend.is_suspect or self._is_probe:
            self._pool.let_rest(self.backend)

    def mark_busy(self) -> None:
        """It answered 503: prefer others for a moment."""
        self.backend.busy_until = asyncio.get_running_loop().time() + BUSY_SECONDS

    def release(self) -> None:
        """The request is over, however it ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._pool.take_back(self.backend)
        if self._is_probe:
            self.backend.is_probed = False
            self._pool.wake_waiting()


class BackendPool:
    """The backends of the latest list, and the queue of requests that found none."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._backends: dict[str, Backend] = {}
        self._waiting: dict[asyncio.Future[Lease], float] = {}  # ordered: oldest first; value: since when
        self._num_picks = 0
        self._num_in_flight = 0

    @property
    def backends(self) -> Collection[Backend]:
        """Those of the latest list, in its order."""
        return self._backends.values()

    @property
    def num_ready(self) -> int:
        """Backends that the latest list calls ready."""
        return sum(backend.state == "ready" for backend in self._backends.values())

    @property
    def num_in_flight(self) -> int:
        """Requests leased to backends, those included that have left the list."""
        return self._num_in_flight

    @property
    def num_waiting(self) -> int:
        """Requests held because no backend can take them."""
        return len(self._waiting)

    def oldest_waiting_seconds(self) -> float:
        """How long the first in the queue has waited; 0 when nobody does."""
        since = next(iter(self._waiting.values()), None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def update(self, entries: Sequence[BackendEntry]) -> None:
        """Take a new list. Known backends keep their counts; those gone finish what they have in flight."""
        known = self._backends
        self._backends = {}
        for entry in entries:
            backend = known.get(entry.id)
            if backend is None or backend.url != entry.url:
                backend = Backend(entry.id, entry.url, entry.state)
            backend.state = entry.state
            self._backends[entry.id] = backend
        self.wake_waiting()

    async def acquire(self, *, refused_by: Collection[Backend], deadline: float) -> Lease | None:
        """A lease on the least loaded backend outside `refused_by`.

        Waits where there is none, until `deadline`, and raises AnswerError when that passes or the queue is
        full. Where `refused_by` is not empty nobody waits: a replica has spoken, None says to pass it on.
        """
        if not self._waiting or refused_by:
            lease = self._pick(refused_by)
            if lease is not None or refused_by:
                return lease
        if len(self._waiting) >= self._max_waiting:
            raise AnswerError(
                503,
                "waiting_queue_full",
                f"no replica is ready and {len(self._waiting)} requests wait already; try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return await self._wait(deadline)

    async def _wait(self, deadline: float) -> Lease:
        loop = asyncio.get_running_loop()
        since = loop.time()
        waiter: asyncio.Future[Lease] = loop.create_future()
        self._waiting[waiter] = since
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except BaseException as error:
            # A lease may have been handed over in the very moment of giving up: give it back.
            if waiter.done() and not waiter.cancelled():
                waiter.result().release()
            if not isinstance(error, TimeoutError):
                raise
            raise AnswerError(
                503,
                "waiting_timeout",
                f"no replica became ready within {loop.time() - since:.1f} s; try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from None
        finally:
            self._waiting.pop(waiter, None)

    def wake_waiting(self) -> None:
        """Hand leases to those who wait, oldest first, as far as there are backends to take them."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            if not waiter.done():
                lease = self._pick(())
                if lease is None:
                    return
                waiter.set_result(lease)
            del self._waiting[waiter]

    def take_back(self, backend: Backend) -> None:
        """One request less in flight."""
        backend.in_flight -= 1
        self._num_in_flight -= 1

    def let_rest(self, backend: Backend) -> None:
        """Leave `backend` alone for a while, twice as long as the last time it needed it."""
        backend.is_suspect = backend.is_resting = True
        backend.is_probed = False
        backend.rest_seconds = min(backend.rest_seconds * 2 or FIRST_REST_SECONDS, LONGEST_REST_SECONDS)
        # The timer alone ends the rest; comparing times would trust it to be exact, which it is not.
        asyncio.get_running_loop().call_later(backend.rest_seconds, self._end_rest, backend)

    def _end_rest(self, backend: Backend) -> None:
        backend.is_resting = False
        self.wake_waiting()

    def _pick(self, refused_by: Collection[Backend]) -> Lease | None:
        now = asyncio.get_running_loop().time()
        best: Backend | None = None
        best_rank = (False, 0, 0)
        for backend in self._backends.values():
            if backend.state != "ready" or backend in refused_by:
                continue
            if backend.is_resting or backend.is_probed:
                continue
            rank = (now < backend.busy_until, backend.in_flight, backend.last_picked)
            if best is None or rank < best_rank:
                best, best_rank = backend, rank
        if best is None:
            return None
        self._num_picks += 1
        best.last_picked = self._num_picks
        best.in_flight += 1
        self._num_in_flight += 1
        best.is_probed = best.is_suspect
        return Lease(self, best, is_probe=best.is_probed)

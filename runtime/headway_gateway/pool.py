"""Which replica takes the next request, and who waits while none can; owns the counts in flight.

The rule: of the ready backends, the one with the fewest requests of this gateway in flight that a new one
meets. Those count several times that are to be streamed and of whose answer nothing has come: what decodes
hardly holds up a new prompt, other prompts do, and a new backend would else be given one after another until
it has as many requests as all others. (Of an answer in one piece nobody knows when it began, so it counts
once.) Where all places of a backend are taken, whose number it tells with each answer, waiting for one counts
as many prompts as take as long (`load.py`). Among equals it is the one picked longest ago, so that a new
backend is first in line.
Requests that wait too late to be answered in time let others pass, so where most do they are not met:
replicas say their share with each answer.
A backend that answered 503 moments ago comes after all others. One that could not be reached is left alone
for a while (0.1 s, doubled up to 2 s), then tried with a single request; it is back for all as soon as a
connection is made. While the operator gives revisions shares of the requests, the revision is chosen first
(`shares.py`), and the rule holds within it.

Where no backend can take a request, the request waits in one queue, first in first out: `max_waiting` long at
most and for `waiting_timeout_seconds`, both of which the operator may move. The bodies in it have at most
`max_waiting_bytes` together, which is for the memory of this process; a request that finds the queue empty
waits whatever its size, else it could never be served. Backends are assigned at the moment of waking, so
nobody overtakes.

Knows nothing of HTTP. Times are seconds of the event loop's clock.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType

from headway_gateway.backend import Backend, BackendEntry
from headway_gateway.config import DEFAULT_MAX_WAITING_BYTES
from headway_gateway.errors import AnswerError
from headway_gateway.load import Pace
from headway_gateway.routing import Routing
from headway_gateway.shares import Shares

FIRST_REST_SECONDS = 0.1
LONGEST_REST_SECONDS = 2.0
RETRY_AFTER_SECONDS = 2
# Nobody knows when a suspended service is resumed; clients need not ask every moment.
SUSPENDED_RETRY_AFTER_SECONDS = 60
DEFAULT_WAITING_TIMEOUT_SECONDS = 30.0


class Lease:
    """The right to send one request to one backend; counted in flight until it is left."""

    __slots__ = (
        "_answered_at",
        "_given",
        "_is_awaited",
        "_is_open",
        "_is_probe",
        "_pool",
        "backend",
    )

    def __init__(self, pool: "BackendPool", backend: Backend, *, is_probe: bool, is_streamed: bool) -> None:
        self.backend = backend
        self._pool = pool
        self._is_probe = is_probe
        # The first piece of a streamed answer will say that its prompt is computed.
        self._is_awaited = is_streamed
        self._is_open = True
        self._given = backend.given(asyncio.get_running_loop().time())
        self._answered_at: float | None = None

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

    def mark_late_share(self, share: float) -> None:
        """It said what share of its requests waits too late."""
        self.backend.note_late_share(share)

    def mark_max_num_seqs(self, number: int) -> None:
        """It said how many requests it computes at once."""
        self.backend.max_num_seqs = self._pool.max_num_seqs = number

    def mark_answered(self, *, is_measured: bool) -> None:
        """The first piece of its answer is here. is_measured: whether that came of a prompt."""
        if not self._is_awaited:
            return
        self._stop_awaiting()
        if is_measured:
            self._answered_at = asyncio.get_running_loop().time()
            self.backend.note_answered(self._given, self._pool.pace, self._answered_at)

    def mark_ended(self) -> None:
        """All of its answer is here."""
        if self._answered_at is not None:
            self._pool.pace.ended(asyncio.get_running_loop().time() - self._answered_at)

    def _stop_awaiting(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self.backend.num_unanswered -= 1

    def mark_busy(self) -> None:
        """It answered 503: prefer others for a moment."""
        self.backend.note_busy(asyncio.get_running_loop().time())

    def release(self) -> None:
        """The request is over, however it ended."""
        if not self._is_open:
            return
        self._stop_awaiting()
        self._is_open = False
        self._pool.take_back(self.backend)
        if self._is_probe:
            self.backend.is_probed = False
            self._pool.wake_waiting()


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request in the queue: when it was received, since when it waits, for how long it may, its body,
    whether its answer is to be streamed."""

    received_at: float
    began_at: float
    limit: asyncio.Timeout
    num_bytes: int
    is_streamed: bool


class BackendPool:
    """The backends of the latest list, and the queue of requests that found none.

    routing: what the operator told last. has_list: whether a list of backends has come, even an empty one.
    max_num_seqs: how many requests a backend computes at once, as the latest of all answers said. pace: what
    answers took.
    """

    def __init__(
        self,
        max_waiting: int,
        waiting_timeout_seconds: float = DEFAULT_WAITING_TIMEOUT_SECONDS,
        *,
        max_waiting_bytes: int = DEFAULT_MAX_WAITING_BYTES,
    ) -> None:
        self.routing = Routing(max_waiting, waiting_timeout_seconds)
        self.max_waiting_bytes = max_waiting_bytes
        self.has_list = False
        self.max_num_seqs: int | None = None
        self.pace = Pace()
        self._waiting_for = ""
        self._shares = Shares({})
        self._backends: dict[str, Backend] = {}
        self._waiting: dict[asyncio.Future[Lease], _Turn] = {}  # ordered: oldest first
        self._somebody_waits = asyncio.Event()
        self._num_picks = 0
        self._num_in_flight = 0
        self._num_waiting_bytes = 0

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

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of their bodies."""
        return self._num_waiting_bytes

    def oldest_waiting_seconds(self) -> float:
        """How long the first in the queue has waited; 0 when nobody does."""
        turn = next(iter(self._waiting.values()), None)
        return 0.0 if turn is None else asyncio.get_running_loop().time() - turn.began_at

    async def demand(self) -> None:
        """Return once a request waits."""
        await self._somebody_waits.wait()

    def update(self, entries: Sequence[BackendEntry], waiting_for: str = "") -> None:
        """Take a new list. Known backends keep their counts; those gone finish what they have in flight.

        waiting_for: what those who are not in it do; told to whoever waits in vain.
        """
        self._waiting_for = waiting_for
        known = self._backends
        self._backends = {}
        for entry in entries:
            backend = known.get(entry.id)
            if backend is None or backend.url != entry.url:
                backend = Backend(entry.id, entry.url, entry.state)
            backend.state = entry.state
            backend.revision = self.routing.revision_of(entry.id)
            self._backends[entry.id] = backend
        self.has_list = True
        self.wake_waiting()

    def route(self, routing: Routing) -> None:
        """Follow the operator's word from now on; those who wait go by it too."""
        if routing.weights != self.routing.weights:
            self._shares = Shares(routing.weights)
        self.routing = routing
        for backend in self._backends.values():
            backend.revision = routing.revision_of(backend.id)
        for waiter, turn in self._waiting.items():
            if routing.is_suspended and not waiter.done():
                waiter.set_exception(_suspended())
            elif not turn.limit.expired():
                turn.limit.reschedule(turn.received_at + routing.waiting_timeout_seconds)
        self.wake_waiting()

    async def acquire(
        self,
        *,
        refused_by: Collection[Backend],
        since: float,
        num_bytes: int = 0,
        is_streamed: bool = False,
    ) -> Lease | None:
        """A lease on the least loaded backend outside `refused_by`, for a request received at `since`.

        num_bytes: of the request's body, which is held while it waits. is_streamed: whether its answer is to
        be; the lease is told when the first piece of it is here.

        Waits where there is none, for as long as the routing allows; raises AnswerError when that passes, the
        queue is full or the service suspended. Where `refused_by` is not empty nobody waits: a replica has
        spoken, None says to pass it on.
        """
        if self.routing.is_suspended:
            raise _suspended()
        if not self._waiting or refused_by:
            lease = self._pick(refused_by, is_streamed=is_streamed)
            if lease is not None or refused_by:
                return lease
        self._check_room(num_bytes)
        return await self._wait(since, num_bytes, is_streamed=is_streamed)

    def _check_room(self, num_bytes: int) -> None:
        """AnswerError where one more would be too many, or too much."""
        held = self._num_waiting_bytes
        if len(self._waiting) >= self.routing.max_waiting:
            full = f"{len(self._waiting)} requests wait already"
        elif self._waiting and held + num_bytes > self.max_waiting_bytes:
            full = (
                f"requests of {held} bytes wait already, with which this one's {num_bytes} are more than the "
                f"{self.max_waiting_bytes} that may"
            )
        else:
            return
        raise AnswerError(
            503,
            "waiting_queue_full",
            f"no replica is ready{self._why()} and {full}; try again later",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    async def _wait(self, since: float, num_bytes: int, *, is_streamed: bool) -> Lease:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Lease] = loop.create_future()
        limit = asyncio.timeout_at(since + self.routing.waiting_timeout_seconds)
        turn = self._waiting[waiter] = _Turn(since, loop.time(), limit, num_bytes, is_streamed)
        self._num_waiting_bytes += num_bytes
        self._somebody_waits.set()
        try:
            async with limit:
                return await waiter
        except BaseException as error:
            # A lease may have been handed over in the very moment of giving up: give it back.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()
            if not isinstance(error, TimeoutError):
                raise
            raise AnswerError(
                503,
                "waiting_timeout",
                f"no replica became ready within {loop.time() - turn.began_at:.1f} s{self._why()}; "
                "try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from None
        finally:
            self._leave(waiter)
            if not self._waiting:
                self._somebody_waits.clear()

    def _leave(self, waiter: asyncio.Future[Lease]) -> None:
        """Out of the queue, unless it has left already."""
        turn = self._waiting.pop(waiter, None)
        if turn is not None:
            self._num_waiting_bytes -= turn.num_bytes

    def _why(self) -> str:
        return f" ({self._waiting_for})" if self._waiting_for else ""

    def wake_waiting(self) -> None:
        """Hand leases to those who wait, oldest first, as far as there are backends to take them."""
        while self._waiting:
            waiter, turn = next(iter(self._waiting.items()))
            if not waiter.done():
                lease = self._pick((), is_streamed=turn.is_streamed)
                if lease is None:
                    return
                waiter.set_result(lease)
            self._leave(waiter)

    def take_back(self, backend: Backend) -> None:
        """One request less in flight."""
        backend.take_back()
        self._num_in_flight -= 1

    def let_rest(self, backend: Backend) -> None:
        """Leave `backend` alone for a while, twice as long as the last time it needed it."""
        backend.is_suspect = backend.is_resting = True
        backend.num_late = 0.0
        backend.is_probed = False
        backend.rest_seconds = min(backend.rest_seconds * 2 or FIRST_REST_SECONDS, LONGEST_REST_SECONDS)
        # The timer alone ends the rest; comparing times would trust it to be exact, which it is not.
        asyncio.get_running_loop().call_later(backend.rest_seconds, self._end_rest, backend)

    def _end_rest(self, backend: Backend) -> None:
        backend.is_resting = False
        self.wake_waiting()

    def _pick(self, refused_by: Collection[Backend], *, is_streamed: bool) -> Lease | None:
        able = [
            backend
            for backend in self._backends.values()
            if backend.state == "ready"
            and not backend.is_resting
            and not backend.is_probed
            and backend not in refused_by
        ]
        if not able:
            return None
        if self.routing.weights:
            chosen = self._shares.draw({backend.revision for backend in able})
            able = [backend for backend in able if chosen is None or backend.revision == chosen]
        for backend in able:
            if backend.max_num_seqs is None:
                backend.max_num_seqs = self.max_num_seqs
        now = asyncio.get_running_loop().time()
        best = min(able, key=lambda one: one.rank(self.pace, now))
        self._num_picks += 1
        best.last_picked = self._num_picks
        best.in_flight += 1
        best.num_unanswered += is_streamed
        self._num_in_flight += 1
        best.is_probed = best.is_suspect
        return Lease(self, best, is_probe=best.is_probed, is_streamed=is_streamed)


def _suspended() -> AnswerError:
    return AnswerError(
        503,
        "suspended",
        "the service is suspended; it answers again once spec.suspend is false",
        retry_after_seconds=SUSPENDED_RETRY_AFTER_SECONDS,
    )

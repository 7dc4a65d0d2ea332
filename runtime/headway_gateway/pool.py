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
A backend that answered 503 moments ago comes after all others, and so does one whose answers are errors of
its own, the longer the more of them came one after another: it may be quick with them, and would draw most
requests. One that could not be reached is left alone for a while (0.1 s, doubled up to 2 s), then tried with
a bare connection, which costs no request its time; it is back as soon as one is made. While the operator
gives revisions shares of the requests, the revision is chosen first (`shares.py`), and the rule holds within
it.

Where no backend can take a request, the request waits in one queue, in the order in which requests were
received: `max_waiting` long at most and for `waiting_timeout_seconds`, both of which the operator may move.
The bodies in it have at most `max_waiting_bytes` together, which is for the memory of this process; a request
that finds the queue empty waits whatever its size, else it could never be served. Backends are assigned at
the moment of waking, so nobody overtakes. Who comes back after an attempt is never too many.

Who waited and is then refused by a backend, which has no room for all, waits on. Such a backend is given
others as it shows to have room: two for each that it takes, one for each that it has answered, and one now
and then.

Who waited for a stream is given to a backend that is busy with no more than eight others of which nothing has
come, and one more for each that has begun since: so the first backend that is ready does not get all of a
crowd when others come a second later, and is as busy as if it did. That holds back nobody whose time is over,
nor whoever is first when the queue is full.

Knows nothing of HTTP. Times are seconds of the event loop's clock.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from headway_gateway.backend import FIRST_PROMPTS, Backend, BackendEntry
from headway_gateway.config import DEFAULT_MAX_WAITING_BYTES
from headway_gateway.errors import AnswerError
from headway_gateway.lease import Lease
from headway_gateway.load import BUSY_SECONDS, Pace
from headway_gateway.rests import Rests
from headway_gateway.routing import Routing
from headway_gateway.shares import Shares
from headway_gateway.waiting import Turn, WaitingQueue

# After the first answer that is an error of its own, and after many.
FAILED_SECONDS, LONGEST_FAILED_SECONDS = 0.5, 8.0
# So many replicas are asked by one request although they have said 503 to others just now.
MOST_REFUSALS = 3
RETRY_AFTER_SECONDS = 2
# Nobody knows when a suspended service is resumed; clients need not ask every moment.
SUSPENDED_RETRY_AFTER_SECONDS = 60
DEFAULT_WAITING_TIMEOUT_SECONDS = 30.0


class BackendPool:
    """The backends of the latest list, and the queue of requests that found none.

    routing: what the operator told last. has_list: whether a list of backends has come, even an empty one.
    num_ready: backends that the latest list calls ready.
    max_num_seqs: how many requests a backend computes at once, as the latest of all answers said. pace: what
    answers took. can_connect: whether a connection to a URL can be made; None for tests without any.
    """

    def __init__(
        self,
        max_waiting: int,
        waiting_timeout_seconds: float = DEFAULT_WAITING_TIMEOUT_SECONDS,
        *,
        max_waiting_bytes: int = DEFAULT_MAX_WAITING_BYTES,
        can_connect: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self.routing = Routing(max_waiting, waiting_timeout_seconds)
        self.max_waiting_bytes = max_waiting_bytes
        self.has_list = False
        self.num_ready = 0
        self.max_num_seqs: int | None = None
        self.pace = Pace()
        self._waiting_for = ""
        self._shares = Shares({})
        self._backends: dict[str, Backend] = {}
        self._waiting = WaitingQueue()
        self._rests = Rests(self._is_known, can_connect, self.wake_waiting)
        self._asked_again: dict[Backend, asyncio.TimerHandle] = {}
        self._num_picks = 0
        self._num_in_flight = 0

    @property
    def backends(self) -> Collection[Backend]:
        """Those of the latest list, in its order."""
        return self._backends.values()

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
        return self._waiting.num_bytes

    def oldest_waiting_seconds(self) -> float:
        """How long the first in the queue has waited; 0 when nobody does."""
        first = self._waiting.first
        return 0.0 if first is None else asyncio.get_running_loop().time() - first.began_at

    async def demand(self) -> None:
        """Return once a request waits."""
        await self._waiting.somebody()

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
        self.num_ready = sum(backend.state == "ready" for backend in self._backends.values())
        self.wake_waiting()

    def route(self, routing: Routing) -> None:
        """Follow the operator's word from now on; those who wait go by it too."""
        if routing.weights != self.routing.weights:
            self._shares = Shares(routing.weights)
        self.routing = routing
        for backend in self._backends.values():
            backend.revision = routing.revision_of(backend.id)
        for turn in self._waiting:
            if routing.is_suspended and not turn.lease.done():
                turn.lease.set_exception(_suspended())
            elif not turn.limit.expired():
                until = max(turn.received_at + routing.waiting_timeout_seconds, turn.least_until)
                turn.limit.reschedule(until)
        self.wake_waiting()

    async def acquire(
        self,
        *,
        refused_by: Collection[Backend],
        since: float,
        num_bytes: int = 0,
        is_streamed: bool = False,
        is_again: bool = False,
        was_held: bool = False,
        least_until: float = 0.0,
    ) -> Lease | None:
        """A lease on the least loaded backend outside `refused_by`, for a request received at `since`.

        num_bytes: of the request's body, which is held while it waits. is_streamed: whether its answer is to
        be; the lease is told when the first piece of it is here. is_again: whether it has been sent before.
        was_held: whether its last lease was. least_until: it may wait until then in any case.

        Waits where there is none, for as long as the routing allows; raises AnswerError when that passes, the
        queue is full or the service suspended. Where `refused_by` is not empty only who was held before
        waits: a replica has spoken, None says to pass it on.
        """
        if self.routing.is_suspended:
            raise _suspended()
        if not self._waiting or refused_by:
            lease = self._pick(refused_by, is_streamed=is_streamed, was_held=was_held)
            if lease is not None or (refused_by and not was_held):
                return lease
        if not is_again:
            while (full := self._why_full(num_bytes)) is not None:
                if not self._let_first_go():
                    raise full
        return await self._wait(since, least_until, num_bytes, is_streamed=is_streamed)

    def _why_full(self, num_bytes: int) -> AnswerError | None:
        """Where one more would be too many, or too much."""
        held = self._waiting.num_bytes
        if len(self._waiting) >= self.routing.max_waiting:
            full = f"{len(self._waiting)} requests wait already"
        elif self._waiting and held + num_bytes > self.max_waiting_bytes:
            full = (
                f"requests of {held} bytes wait already, with which this one's {num_bytes} are more than the "
                f"{self.max_waiting_bytes} that may"
            )
        else:
            return None
        return AnswerError(
            503,
            "waiting_queue_full",
            f"no replica is ready{self._why()} and {full}; try again later",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    async def _wait(self, since: float, least_until: float, num_bytes: int, *, is_streamed: bool) -> Lease:
        loop = asyncio.get_running_loop()
        now = loop.time()
        limit = asyncio.timeout_at(max(since + self.routing.waiting_timeout_seconds, least_until))
        turn = Turn(loop.create_future(), since, now, limit, least_until, num_bytes, is_streamed)
        self._waiting.join(turn)
        try:
            async with limit:
                return await turn.lease
        except BaseException as error:
            # A lease may have been handed over in the very moment of giving up: give it back.
            if turn.lease.done() and not turn.lease.cancelled() and turn.lease.exception() is None:
                turn.lease.result().release()
            if not isinstance(error, TimeoutError):
                raise
            lease = self._pick((), is_streamed=is_streamed, was_held=True, is_urgent=True)
            if lease is not None:
                return lease
            raise AnswerError(
                503,
                "waiting_timeout",
                f"no replica could take it within {loop.time() - turn.began_at:.1f} s{self._why()}; "
                "try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from None
        finally:
            self._waiting.leave(turn)

    def _why(self) -> str:
        return f" ({self._waiting_for})" if self._waiting_for else ""

    def wake_waiting(self) -> None:
        """Hand leases to those who wait, oldest first, as far as there are backends to take them."""
        while (turn := self._waiting.first) is not None:
            if not turn.lease.done():
                lease = self._pick((), is_streamed=turn.is_streamed, was_held=True)
                if lease is None:
                    return
                turn.lease.set_result(lease)
            self._waiting.leave(turn)
        for backend in self._backends.values():
            backend.room = None
            backend.most_prompts = FIRST_PROMPTS

    def _let_first_go(self) -> bool:
        """Hand a lease to who is first, whatever its backend has to compute; whether there was one."""
        turn = self._waiting.first
        if turn is None or turn.lease.done():
            return False
        lease = self._pick((), is_streamed=turn.is_streamed, was_held=True, is_urgent=True)
        if lease is None:
            return False
        turn.lease.set_result(lease)
        self._waiting.leave(turn)
        return True

    def note_begun(self, backend: Backend) -> None:
        """The first piece of a stream is here."""
        if self._waiting:
            backend.most_prompts += 1
            self.wake_waiting()

    def take_back(self, backend: Backend, *, has_room: bool) -> None:
        """One request less in flight. has_room: whether it is one less at the backend, too."""
        backend.take_back()
        self._num_in_flight -= 1
        if has_room:
            self._make_room(backend, 1)
        if self._waiting:
            self.wake_waiting()

    def note_taken(self, backend: Backend, *, is_error: bool) -> None:
        """It has begun to answer. Errors of its own make it the last choice for a while."""
        if is_error:
            seconds = min(FAILED_SECONDS * 2**backend.num_failures, LONGEST_FAILED_SECONDS)
            backend.busy_until = asyncio.get_running_loop().time() + seconds
            backend.num_failures = min(backend.num_failures + 1, 16)
        else:
            backend.num_failures = 0
        self._make_room(backend, 2)

    def note_busy(self, backend: Backend, *, has_no_room: bool) -> None:
        """It answered 503. has_no_room: to one who had waited."""
        loop = asyncio.get_running_loop()
        backend.note_busy(loop.time())
        if has_no_room:
            backend.room = 0
            # Of many that it refuses together only the first counts.
            if backend not in self._asked_again:
                self._asked_again[backend] = loop.call_later(BUSY_SECONDS, self._ask_again, backend)

    def _ask_again(self, backend: Backend) -> None:
        del self._asked_again[backend]
        if backend.room == 0:
            self._make_room(backend, 1)

    def _make_room(self, backend: Backend, number: int) -> None:
        if backend.room is not None:
            backend.room += number
            self.wake_waiting()

    def let_rest(self, backend: Backend) -> None:
        """It could not be reached."""
        self._rests.begin(backend)

    def trust(self, backend: Backend) -> None:
        """A connection to it stands."""
        self._rests.end(backend)

    def close(self) -> None:
        """Nobody is tried or asked any more."""
        self._rests.close()
        for timer in self._asked_again.values():
            timer.cancel()

    def _is_known(self, backend: Backend) -> bool:
        return self._backends.get(backend.id) is backend

    def _pick(
        self,
        refused_by: Collection[Backend],
        *,
        is_streamed: bool,
        was_held: bool = False,
        is_urgent: bool = False,
    ) -> Lease | None:
        heeds_prompts = was_held and is_streamed and not is_urgent
        now = asyncio.get_running_loop().time()
        is_enough = len(refused_by) >= MOST_REFUSALS
        able = [
            backend
            for backend in self._backends.values()
            if backend.state == "ready"
            and not backend.is_suspect
            and backend not in refused_by
            and not (is_enough and now < backend.busy_until)
            and not (was_held and backend.room == 0)
            and not (heeds_prompts and backend.num_unanswered >= backend.most_prompts)
        ]
        if not able:
            return None
        if self.routing.weights:
            chosen = self._shares.draw({backend.revision for backend in able})
            able = [backend for backend in able if chosen is None or backend.revision == chosen]
        for backend in able:
            if backend.max_num_seqs is None:
                backend.max_num_seqs = self.max_num_seqs
        best = able[0] if len(able) == 1 else min(able, key=lambda one: one.rank(self.pace, now))
        self._num_picks += 1
        best.last_picked = self._num_picks
        best.in_flight += 1
        best.num_unanswered += is_streamed
        if best.room:
            best.room -= 1
        self._num_in_flight += 1
        return Lease(self, best, now, was_held=was_held, is_streamed=is_streamed)


def _suspended() -> AnswerError:
    return AnswerError(
        503,
        "suspended",
        "the service is suspended; it answers again once spec.suspend is false",
        retry_after_seconds=SUSPENDED_RETRY_AFTER_SECONDS,
    )

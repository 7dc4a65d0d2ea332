"""Runs one load: says when each request is due, sends it then, and keeps the records.

Open loop: conversations begin when they are due, whatever became of those before them, so that a slow server
does not slow its load (no coordinated omission). Closed loop: so many users, each of whom begins the next
conversation when the last has ended. In both, a later turn is due its think time after the answer before it.

A user whose request failed waits `PAUSE_AFTER_FAILURE_SECONDS`, or a server that refuses everything would be
asked as fast as it refuses.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway_bench.answer import Answer
from headway_bench.record import Record
from headway_bench.sender import History, Sender
from headway_bench.workload import Conversation, Turn, Workload

PAUSE_AFTER_FAILURE_SECONDS = 0.1
MOST_PREPARED_BYTES = 256 * 1024 * 1024
LONGEST_PREPARATION_SECONDS = 20.0
_ROUNDING_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a load lasts: it ends with the first of both; what is warm-up comes on top and first."""

    num_requests: int | None
    duration_seconds: float | None
    warmup_requests: int = 0
    warmup_seconds: float = 0.0


class Gate:
    """Lets requests through until the load's extent is reached, and tells which are warm-up."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._num_warmup = self._num_measured = 0
        self._measured_from = None if extent.warmup_requests else extent.warmup_seconds

    def admit(self, due_seconds: float) -> bool | None:
        """Whether a request due then (since the load's start) is measured; None when the load is over."""
        extent = self._extent
        if self._num_warmup < extent.warmup_requests or due_seconds < extent.warmup_seconds:
            self._num_warmup += 1
            return False
        if self._measured_from is None:
            self._measured_from = due_seconds
        if extent.num_requests is not None and self._num_measured >= extent.num_requests:
            return None
        end = math.inf if extent.duration_seconds is None else self._measured_from + extent.duration_seconds
        if due_seconds >= end - _ROUNDING_SECONDS:
            return None
        self._num_measured += 1
        return True


class Lookahead:
    """First requests, made before the load begins: making them then would delay sending and reading."""

    def __init__(self, workload: Workload, first_body: Callable[[Turn], bytes]) -> None:
        self._workload = workload
        self._first_body = first_body
        self._ready: dict[int, tuple[Conversation, bytes]] = {}

    async def prepare(self, num_conversations: int) -> int:
        """Make so many ahead, as far as memory and time allow; returns how many. May be cancelled."""
        num_bytes, give_up_at = 0, time.perf_counter() + LONGEST_PREPARATION_SECONDS
        for number in range(num_conversations):
            if num_bytes > MOST_PREPARED_BYTES or time.perf_counter() > give_up_at:
                break
            await asyncio.sleep(0)
            self._ready[number] = self._make(number)
            # A text is held twice: in the conversation and in the body.
            num_bytes += 2 * len(self._ready[number][1])
        return len(self._ready)

    def take(self, number: int) -> tuple[Conversation, bytes]:
        """The n-th conversation and the body of its first request; made now if not before."""
        return self._ready.pop(number, None) or self._make(number)

    def _make(self, number: int) -> tuple[Conversation, bytes]:
        conversation = self._workload(number)
        return conversation, self._first_body(conversation[0])


class Drive:
    """One load under way. `records` are in the order of sending and grow as it runs."""

    def __init__(
        self,
        sender: Sender,
        lookahead: Lookahead,
        extent: Extent,
        *,
        keep_texts: bool,
        recount: Callable[[Answer, Record], None] | None = None,
    ) -> None:
        self.records: list[Record] = []
        self.started_at = 0.0
        self.num_in_flight = 0
        self._sender = sender
        self._lookahead = lookahead
        self._gate = Gate(extent)
        self._keep_texts = keep_texts
        self._recount = recount
        self._to_recount: list[tuple[Answer, Record]] = []
        self._numbers = itertools.count()

    async def open_loop(self, arrivals: Iterator[float]) -> None:
        """Begin conversations at `arrivals` (seconds from now); returns when all have ended."""
        self.started_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for at_seconds in arrivals:
                due_at = self.started_at + at_seconds
                # A load that is behind its schedule must still let answers be read between two sends.
                await (_sleep_until(due_at) if due_at > time.perf_counter() else asyncio.sleep(0))
                is_measured = self._gate.admit(at_seconds)
                if is_measured is None:
                    break
                tasks.create_task(self._converse(next(self._numbers), due_at, is_measured=is_measured))

    async def closed_loop(self, num_users: int, ramp_seconds: float) -> None:
        """Keep so many users busy, who come one after the other over `ramp_seconds`."""
        self.started_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_users):
                tasks.create_task(self._user(self.started_at + ramp_seconds * number / num_users))

    def finish_counts(self) -> None:
        """Count tokens that the server did not tell; after the load, for it takes time."""
        if self._recount is not None:
            for answer, record in self._to_recount:
                self._recount(answer, record)
        self._to_recount.clear()

    async def _user(self, begin_at: float) -> None:
        due_at = begin_at
        while True:
            await _sleep_until(due_at)
            is_measured = self._gate.admit(due_at - self.started_at)
            if is_measured is None:
                return
            failed = await self._converse(next(self._numbers), due_at, is_measured=is_measured)
            due_at = time.perf_counter() + (PAUSE_AFTER_FAILURE_SECONDS if failed else 0.0)

    async def _converse(self, number: int, due_at: float, *, is_measured: bool) -> bool:
        """All turns of one conversation; whether one failed, which ends it."""
        conversation, body = self._lookahead.take(number)
        history = History(self._sender.target.endpoint)
        admitted: bool | None = is_measured
        for turn_number, turn in enumerate(conversation):
            if turn_number:
                due_at = time.perf_counter() + turn.think_seconds
                await _sleep_until(due_at)
                admitted = self._gate.admit(due_at - self.started_at)
                if admitted is None:
                    return False
                body = self._sender.target.body(turn, history)
            record = Record(number, turn_number, not admitted, due_at, turn.input_tokens, turn.output_tokens)
            answer = await self._request(body, record)
            if record.failure:
                return True
            if turn_number + 1 < len(conversation):
                history.add(turn.prompt, "".join(answer.contents))
        return False

    async def _request(self, body: bytes, record: Record) -> Answer:
        self.records.append(record)
        self.num_in_flight += 1
        try:
            answer = await self._sender.send(body, record, keep_texts=self._keep_texts)
        finally:
            self.num_in_flight -= 1
        if self._recount is not None and record.is_complete:
            self._to_recount.append((answer, record))
        return answer


async def _sleep_until(at_seconds: float) -> None:
    # Loops round a sleep to milliseconds, some of them down; what is left is then slept in steps of the loop.
    while (remaining := at_seconds - time.perf_counter()) > 0:  # noqa: ASYNC110 - waits for a time, not for a state
        await asyncio.sleep(remaining)

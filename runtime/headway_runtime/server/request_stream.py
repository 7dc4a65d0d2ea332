"""What comes back for the requests of one submission, for the task that reads it.

A stream that waits can have single tokens handed to it right there, without a task being woken for each; all
else wakes its task once, and of many that are to be woken a few in each round of the loop (`turnstile`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headway_runtime.request import RequestOutput
from headway_runtime.server import messages
from headway_runtime.server.turnstile import Turnstile


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The last event of every stream when the engine process ends, or when it is no longer asked."""

    message: str
    code: Literal["engine_dead", "shutting_down"] = "engine_dead"


StreamEvent = RequestOutput | messages.Refused | EngineDied


# Takes the next token of a request at once. False: not now; it comes as an event instead.
TakeToken = Callable[[str, int, float], bool]


class RequestStream:
    """What comes back for the requests of one submission, in the order of arrival."""

    __slots__ = ("_events", "_is_in_line", "_turnstile", "_waiter", "request_ids", "take_token")

    def __init__(self, request_ids: frozenset[str], turnstile: Turnstile) -> None:
        """turnstile: of all streams, through which those pass whose readers are to be woken."""
        self.request_ids = request_ids
        self._turnstile = turnstile
        # Set only while the reader waits and nothing is kept for it, so that nothing is overtaken.
        self.take_token: TakeToken | None = None
        self._events: list[StreamEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_in_line = False

    async def next(self, take_token: TakeToken | None = None) -> list[StreamEvent]:
        """Everything that has come since the last call; waits for the first event.

        Meanwhile `take_token` is offered single tokens outside of this task. What it raises is raised here.
        `wake` makes this return although nothing has come.
        """
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            self.take_token = take_token
            try:
                await self._waiter
            finally:
                self.take_token = None
        events, self._events = self._events, []
        return events

    def push(self, event: StreamEvent) -> None:
        self.take_token = None
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Let `next` return, when it is this stream's turn."""
        if self._waiter is not None and not self._waiter.done() and not self._is_in_line:
            self._is_in_line = True
            self._turnstile.run(self._wake_now)

    def _wake_now(self) -> bool:
        self._is_in_line = False
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    def fail(self, error: Exception) -> None:
        """Let `next` raise."""
        self.take_token = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

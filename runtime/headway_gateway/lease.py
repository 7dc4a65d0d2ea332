"""One request's right to one backend, and what came of it, told to the pool that gave it."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from headway_gateway.backend import Backend

if TYPE_CHECKING:
    from headway_gateway.pool import BackendPool


class Lease:
    """The right to send one request to one backend; counted in flight until it is left."""

    __slots__ = (
        "_answered_at",
        "_given",
        "_is_awaited",
        "_is_open",
        "_is_refused",
        "_pool",
        "backend",
        "was_held",
    )

    def __init__(
        self, pool: "BackendPool", backend: Backend, now: float, *, was_held: bool, is_streamed: bool
    ) -> None:
        self.backend = backend
        # Whether it was waited for.
        self.was_held = was_held
        self._pool = pool
        self._is_refused = False
        # The first piece of a streamed answer will say that its prompt is computed.
        self._is_awaited = is_streamed
        self._is_open = True
        self._given = backend.given(now)
        self._answered_at: float | None = None

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def mark_reached(self) -> None:
        """A connection to the backend stands."""
        if self.backend.is_suspect:
            self._pool.trust(self.backend)

    def mark_unreachable(self) -> None:
        """No connection could be made: let it rest. Of many that fail together only the first counts."""
        if not self.backend.is_suspect:
            self._pool.let_rest(self.backend)

    def mark_taken(self, *, is_error: bool) -> None:
        """It has not refused the request. is_error: whether its answer is an error of its own."""
        self._pool.note_taken(self.backend, is_error=is_error)

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
        self._pool.note_begun(self.backend)

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
        self._is_refused = True
        self._pool.note_busy(self.backend, has_no_room=self.was_held)

    def release(self) -> None:
        """The request is over, however it ended."""
        if not self._is_open:
            return
        self._stop_awaiting()
        self._is_open = False
        self._pool.take_back(self.backend, has_room=not self._is_refused)

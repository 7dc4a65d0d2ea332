"""The bytes of all request bodies that this process has in its memory, and how many there may be.

A body is held from its announcement (a `Content-Length`, else as its pieces come) until the first byte of its
answer, or whatever ends its request before. While it is held it can be sent to another replica. One that is
not here after `ANNOUNCED_SECONDS` has room for what has come of it from then on, as if it had announced
nothing: who uploads slowly, or never, keeps no room from others.

Bodies above `LARGEST_SMALL_BYTES` have three quarters of the limit together, so that small ones go on when
large ones are refused. A large one is taken whatever its size where there is no other: it could else never
be served. Knows nothing of HTTP, but for the answer to who is refused.
"""

from headway_gateway.errors import BodyError

LARGEST_SMALL_BYTES = 64 * 1024
RETRY_AFTER_SECONDS = 2
ANNOUNCED_SECONDS = 10.0
# Where nobody says how much memory there is: half of what the operator gives a gateway by default.
DEFAULT_LIMIT_BYTES = 256 * 1024 * 1024
# Of a container's memory: the rest is the process itself, its connections, and what the allocator keeps.
LIMIT_DIVISOR = 2


def limit_of(memory_bytes: int | None) -> int:
    """The default limit in a container of so much memory; None for one of unknown memory."""
    return DEFAULT_LIMIT_BYTES if memory_bytes is None else max(1, memory_bytes // LIMIT_DIVISOR)


class HeldBody:
    """One body, or the room for it; `data` is empty before all of it is here and after it was dropped."""

    __slots__ = ("_budget", "_num_bytes", "data")

    def __init__(self, budget: "BodyBudget") -> None:
        self.data = b""
        self._budget = budget
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self.data)

    def make_room(self, num_bytes: int) -> None:
        """It has so many bytes, or will have. Raises BodyError where there is no room for them."""
        if num_bytes > self._num_bytes:
            self._budget.replace(self._num_bytes, num_bytes)
            self._num_bytes = num_bytes

    def keep_room(self, num_bytes: int) -> None:
        """For so many bytes and no longer for more, until more have come."""
        if num_bytes < self._num_bytes:
            self._budget.replace(self._num_bytes, num_bytes)
            self._num_bytes = num_bytes

    def drop(self) -> None:
        """Nobody will be sent it any more."""
        self.data = b""
        if self._num_bytes:
            self._budget.replace(self._num_bytes, 0)
            self._num_bytes = 0


class BodyBudget:
    """The one account of a process. num_refused: bodies since it started."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_refused = 0
        self._large_limit_bytes = limit_bytes * 3 // 4
        self._small_bytes = 0
        self._large_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of all bodies."""
        return self._small_bytes + self._large_bytes

    def replace(self, before: int, after: int) -> None:
        """A body had `before` bytes and has `after`. Raises BodyError, and changes nothing, if they are too
        many more."""
        small, large = self._small_bytes, self._large_bytes
        if before > LARGEST_SMALL_BYTES:
            large -= before
        else:
            small -= before
        if after > before and not self._has_room(after, small, large):
            self.num_refused += 1
            raise self._refusal(after)
        if after > LARGEST_SMALL_BYTES:
            large += after
        else:
            small += after
        self._small_bytes, self._large_bytes = small, large

    def _has_room(self, num_bytes: int, small: int, large: int) -> bool:
        if num_bytes > LARGEST_SMALL_BYTES:
            return not large or large + num_bytes <= self._large_limit_bytes
        return small + num_bytes <= self.limit_bytes - min(large, self._large_limit_bytes)

    def _refusal(self, num_bytes: int) -> BodyError:
        if num_bytes > LARGEST_SMALL_BYTES:
            held, limit = self._large_bytes, self._large_limit_bytes
            whose = f"bodies above {LARGEST_SMALL_BYTES} bytes"
        else:
            held, limit, whose = self.held_bytes, self.limit_bytes, "bodies"
        return BodyError(
            503,
            f"{whose} have {held} bytes of this gateway's memory, and with this one's {num_bytes} more than "
            f"the {limit} that they may (--max-held-bytes={self.limit_bytes}); try again later",
            code="body_memory_full",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

"""The places for clients' connections: who has one, who rests on one, and who found none.

As at a replica: a place is made by closing the connection that has rested longest, but none that has rested
for less than a second, as a request may be on its way there. Who still finds no place is kept beside them
until its request is here, which is answered (503, or what costs nothing: probes, metrics, the operator's),
and then closed; who is closed before it has written may never read an answer. Those are bounded, too: one
more, and the oldest of them is closed at once.

Knows nothing of HTTP, and reads no clock.
"""

from typing import Protocol

REST_SECONDS = 1.0
MOST_BEYOND = 1024
# What one takes while its answer is streamed is 32 KiB, and connections are to take a quarter of the memory.
MEMORY_BYTES_EACH = 128 * 1024
DEFAULT_LIMIT = 8192  # as a replica has it
# Files besides: the interpreter's, what is listened on, the way to the API server.
SPARE_FILES = 256


def limit_of(told: int | None, memory_bytes: int | None, open_files: int | None) -> int:
    """How many there may be: as `told`, else by the memory; never more than there are files for, of which a
    request takes two."""
    limit = told
    if limit is None:
        limit = DEFAULT_LIMIT if memory_bytes is None else memory_bytes // MEMORY_BYTES_EACH
    if open_files is not None:
        limit = min(limit, (open_files - SPARE_FILES - MOST_BEYOND) // 2)
    return max(1, limit)


class Connection(Protocol):
    """What a connection can be told; it calls `leave` when it has ended."""

    def give_way(self) -> None:
        """End at once: somebody else comes."""


class Connections:
    """Lives in the event loop's thread. num_refused: requests since the start."""

    def __init__(self, limit: int, most_beyond: int = MOST_BEYOND) -> None:
        self.limit = limit
        self.num_refused = 0
        self._most_beyond = most_beyond
        self._seated: set[object] = set()
        # In the order in which they began: since when each rests, and who found no place.
        self._resting: dict[Connection, float] = {}
        self._beyond: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._seated) + len(self._beyond)

    def enter(self, connection: Connection, now: float) -> bool:
        """A new one, which has asked for nothing yet; whether it has a place."""
        if self._find(connection, now):
            self._resting[connection] = now
            return True
        if len(self._beyond) >= self._most_beyond:
            oldest = next(iter(self._beyond))
            del self._beyond[oldest]
            oldest.give_way()
        self._beyond[connection] = None
        return False

    def has_place(self, connection: object, now: float) -> bool:
        """Whether it has one, or one can be found by now."""
        return connection not in self._beyond or self._find(connection, now)

    def rests(self, connection: Connection, now: float) -> None:
        """All that it asked for has been answered."""
        if connection in self._seated:
            self._resting.pop(connection, None)
            self._resting[connection] = now

    def works(self, connection: Connection) -> None:
        """It asks for something."""
        self._resting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """It has ended."""
        self._seated.discard(connection)
        self._resting.pop(connection, None)
        self._beyond.pop(connection, None)

    def _find(self, connection: object, now: float) -> bool:
        if len(self._seated) >= self.limit and not self._make_room(now):
            return False
        self._beyond.pop(connection, None)  # type: ignore[call-overload] # whatever is no key is not there
        self._seated.add(connection)
        return True

    def _make_room(self, now: float) -> bool:
        longest = next(iter(self._resting), None)
        if longest is None or now - self._resting[longest] < REST_SECONDS:
            return False
        self.leave(longest)
        longest.give_way()
        return True

"""The places for connections of one HTTP process: who has one, who rests on one, and who found none.

A place is made by closing the connection that has rested longest, but none that has rested for less than a
second: a request may be on its way there, and closing would reset it. Who still finds no place is kept beside
them for as long as it takes to hear the request and to answer it with an error, since a client that is
answered or closed before it has written may never read the answer. Those are bounded, too: one more, and the
oldest of them is answered and closed at once.

Knows nothing of HTTP, and reads no clock.
"""

from typing import Protocol

REST_SECONDS = 1.0
MOST_TURNED_AWAY = 1024


class Connection(Protocol):
    """What a connection can be told; it calls `leave` when it has ended."""

    def close(self) -> None:
        """End: somebody else needs the place."""

    def turn_out(self) -> None:
        """Say that there is no place, and end."""


class Places:
    """Lives in the event loop's thread. num_places: at a time; num_turned_away: likewise, besides those."""

    def __init__(self, num_places: int, num_turned_away: int = MOST_TURNED_AWAY) -> None:
        self.num_places = num_places
        self._num_turned_away = num_turned_away
        self._seated: set[Connection] = set()
        # In the order in which they began: since when each rests, and who found no place.
        self._resting: dict[Connection, float] = {}
        self._turned_away: dict[Connection, None] = {}

    def enter(self, connection: Connection, now: float) -> bool:
        """A new connection that has asked for nothing yet; whether it has a place."""
        if self.find(connection, now):
            self._resting[connection] = now
            return True
        if len(self._turned_away) >= self._num_turned_away:
            oldest = next(iter(self._turned_away))
            del self._turned_away[oldest]
            oldest.turn_out()
        self._turned_away[connection] = None
        return False

    def find(self, connection: Connection, now: float) -> bool:
        """Look for a place for one that has none; it counts as at work then."""
        if len(self._seated) >= self.num_places and not self._make_room(now):
            return False
        self._turned_away.pop(connection, None)
        self._seated.add(connection)
        return True

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
        self._turned_away.pop(connection, None)

    def is_turned_away(self, connection: Connection) -> bool:
        """Whether it found no place and still waits to be told."""
        return connection in self._turned_away

    def _make_room(self, now: float) -> bool:
        longest = next(iter(self._resting), None)
        if longest is None or now - self._resting[longest] < REST_SECONDS:
            return False
        self.leave(longest)
        longest.close()
        return True

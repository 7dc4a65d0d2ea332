"""The queue of requests that found no backend, in the order in which they were received. Chooses nothing."""

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway_gateway.lease import Lease


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request in the queue: who is told, when it was received, since when it waits, for how long it may
    and until when in any case, its body, whether its answer is to be streamed."""

    lease: "asyncio.Future[Lease]"
    received_at: float
    began_at: float
    limit: asyncio.Timeout
    least_until: float
    num_bytes: int
    is_streamed: bool


class WaitingQueue:
    """Turns, of which any may leave at any time."""

    def __init__(self) -> None:
        self._turns: set[Turn] = set()
        # (received at, number, turn), of which some have left.
        self._order: list[tuple[float, int, Turn]] = []
        self._number = 0
        self._is_somebody_there = asyncio.Event()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter([*self._turns])

    @property
    def first(self) -> Turn | None:
        """Who was received before all others."""
        while self._order and self._order[0][-1] not in self._turns:
            heapq.heappop(self._order)
        return self._order[0][-1] if self._order else None

    def join(self, turn: Turn) -> None:
        """Somebody who may have been received before others that wait."""
        self._number += 1
        heapq.heappush(self._order, (turn.received_at, self._number, turn))
        self._turns.add(turn)
        self.num_bytes += turn.num_bytes
        self._is_somebody_there.set()

    def leave(self, turn: Turn) -> None:
        """Nothing where it has left already."""
        if turn in self._turns:
            self._turns.remove(turn)
            self.num_bytes -= turn.num_bytes
        if not self._turns:
            self._order.clear()
            self._is_somebody_there.clear()

    async def somebody(self) -> None:
        """Return once a request waits."""
        await self._is_somebody_there.wait()

"""Who is let in when, counted in rounds of the event loop."""

from __future__ import annotations

import asyncio

from headway_runtime.server.turnstile import Turnstile


class Rounds:
    """Counts how often the event loop has gone round."""

    def __init__(self) -> None:
        self.number = 0
        self._turn()

    def _turn(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._turn)


async def test_a_crowd_is_let_in_by_handfuls_in_the_order_of_arrival() -> None:
    turnstile, rounds = Turnstile(per_turn=3), Rounds()
    entered: list[tuple[int, int]] = []

    async def come(number: int) -> None:
        await turnstile.enter()
        entered.append((number, rounds.number))

    async with asyncio.timeout(10):
        await asyncio.gather(*(come(number) for number in range(10)))
    assert [number for number, _ in entered] == list(range(10))
    per_round = [[at for _, at in entered].count(one) for one in sorted({at for _, at in entered})]
    assert per_round == [3, 3, 3, 1]


async def test_who_comes_alone_does_not_wait() -> None:
    turnstile, rounds = Turnstile(per_turn=1), Rounds()
    for _ in range(3):
        before = rounds.number
        await turnstile.enter()
        assert rounds.number == before
        await asyncio.sleep(0.001)


async def test_who_gives_up_in_the_line_takes_nobodys_place() -> None:
    turnstile = Turnstile(per_turn=1)
    first, second, *others = [asyncio.ensure_future(turnstile.enter()) for _ in range(4)]
    await asyncio.sleep(0)
    assert first.done()
    second.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*others)
    assert second.cancelled()

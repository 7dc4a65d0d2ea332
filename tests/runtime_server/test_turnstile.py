"""Who is let in when, counted in rounds of the event loop."""

from __future__ import annotations

import asyncio

from headway_runtime.server.turnstile import LONGEST_WAY_SECONDS, Turnstile


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


async def test_what_is_to_be_done_waits_its_turn_behind_a_crowd() -> None:
    turnstile, rounds = Turnstile(per_turn=2), Rounds()
    done: list[tuple[int, int]] = []
    everything = asyncio.Event()

    def passage(number: int) -> bool:
        done.append((number, rounds.number))
        if len(done) == 5:
            everything.set()
        return True

    first_round = rounds.number
    for number in range(5):
        turnstile.run(lambda number=number: passage(number))  # type: ignore[misc]
    assert [number for number, _ in done] == [0, 1], "the first ones pass at once"
    async with asyncio.timeout(10):
        await everything.wait()
    assert [number for number, _ in done] == list(range(5))
    assert [at - first_round for _, at in done] == [0, 0, 1, 1, 2]


async def test_what_has_become_needless_takes_nobodys_place() -> None:
    turnstile, rounds = Turnstile(per_turn=1), Rounds()
    done: list[int] = []
    reached = asyncio.Event()

    def last() -> bool:
        done.append(rounds.number)
        reached.set()
        return True

    before = rounds.number
    for _ in range(20):
        turnstile.run(lambda: False)
    turnstile.run(last)
    async with asyncio.timeout(10):
        await reached.wait()
    assert done == [before]


async def test_a_passage_that_fails_keeps_nobody_waiting() -> None:
    loop, failures = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    turnstile = Turnstile(per_turn=1)
    await turnstile.enter()

    def fail() -> bool:
        raise ValueError("this one fails")

    turnstile.run(fail)
    async with asyncio.timeout(10):
        await turnstile.enter()
        await turnstile.enter()
    assert [str(one) for one in failures] == ["this one fails"]


async def rounds_until_passed(turnstile: Turnstile, rounds: Rounds, *, way_is_made: bool) -> int:
    """How many rounds somebody waits, with way made in each of the next ten of them or in none."""
    passed: list[int] = []
    before = rounds.number

    def passage() -> bool:
        passed.append(rounds.number)
        return True

    turnstile.run(passage)
    for _ in range(10):
        if way_is_made:
            turnstile.make_way()
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not passed:  # noqa: ASYNC110 - the rounds are what is counted
            await asyncio.sleep(0)
    return passed[0] - before


async def test_who_is_in_line_makes_way_for_a_while_and_then_as_long_not() -> None:
    now = 100.0
    turnstile, rounds = Turnstile(per_turn=1, clock=lambda: now), Rounds()
    turnstile.make_way()
    assert await rounds_until_passed(turnstile, rounds, way_is_made=False) <= 2
    turnstile.make_way()
    assert await rounds_until_passed(turnstile, rounds, way_is_made=True) >= 10
    now += LONGEST_WAY_SECONDS
    turnstile.make_way()
    assert await rounds_until_passed(turnstile, rounds, way_is_made=True) <= 2, "they made way long enough"
    now += LONGEST_WAY_SECONDS
    turnstile.make_way()
    assert await rounds_until_passed(turnstile, rounds, way_is_made=True) >= 10


async def test_after_the_way_one_passes_in_each_round_while_others_come() -> None:
    now = 100.0
    turnstile, rounds = Turnstile(per_turn=4, clock=lambda: now), Rounds()
    passed: list[int] = []

    def passage() -> bool:
        passed.append(rounds.number)
        return True

    turnstile.make_way()
    for _ in range(30):
        turnstile.run(passage)
    now += LONGEST_WAY_SECONDS
    for _ in range(12):
        turnstile.make_way()
        await asyncio.sleep(0)
    assert 10 <= len(passed) <= 12
    assert len({*passed}) == len(passed), "two in one round"
    async with asyncio.timeout(10):
        while len(passed) < 30:  # noqa: ASYNC110 - the rounds are what is counted
            await asyncio.sleep(0)
    assert passed.count(passed[-3]) == 4, "nobody comes any more"

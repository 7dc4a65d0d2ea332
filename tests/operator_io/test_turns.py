"""Who computes next, and how far apart passes are."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from headway_operator import loop as loop_module
from headway_operator.loop import ServiceLoop
from headway_operator.names import ServiceKey
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Carried, Outcome
from headway_operator.turns import Turns

WOKEN = ServiceKey("default", "woken")


def by_the_clock(number: int) -> ServiceKey:
    return ServiceKey("default", f"clock-{number}")


async def test_one_goes_on_in_each_round_and_the_woken_first() -> None:
    turns, order, rounds = Turns(woken=1, by_the_clock=8), [], []

    async def one(key: ServiceKey, *, is_woken: bool) -> None:
        async with turns.place(key, is_woken=is_woken):
            await turns.pace(key)
            order.append(key)
            rounds.append(round_now)

    round_now = 0
    tasks = [asyncio.create_task(one(by_the_clock(n), is_woken=False)) for n in range(4)]
    tasks.append(asyncio.create_task(one(WOKEN, is_woken=True)))
    while not all(task.done() for task in tasks):
        round_now += 1
        await asyncio.sleep(0)

    assert order.index(WOKEN) <= 1  # at most one was called before it asked
    assert [key for key in order if key != WOKEN] == [by_the_clock(n) for n in range(4)]
    assert len(set(rounds)) == len(rounds), "two computed in one round of the event loop"


async def test_a_pass_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    turns, went_on = Turns(woken=1, by_the_clock=8), []

    async def one(number: int) -> None:
        await turns.pace(by_the_clock(number))
        went_on.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert went_on == [0, 2, 3]

    await asyncio.wait_for(turns.pace(WOKEN), 5)  # and calling begins anew


async def passes(seconds: float, interval: float, count: int, patch: pytest.MonkeyPatch) -> list[float]:
    """When each of so many passes, which take so many seconds, began."""
    began: list[float] = []
    are_enough = asyncio.Event()

    async def takes_its_time(world: Any, manifest: Any, carried: Carried) -> Outcome:
        began.append(time.monotonic())
        if len(began) == count:
            are_enough.set()
        await asyncio.sleep(seconds)
        return Outcome(WOKEN, {})

    async def fetch(_: ServiceKey) -> dict[str, Any]:
        return {"metadata": {"uid": "u1"}}

    patch.setattr(loop_module, "reconcile", takes_its_time)
    world: Any = None
    loop = ServiceLoop(world, WOKEN, fetch, interval_seconds=interval, metrics=OperatorMetrics())
    task = asyncio.create_task(loop.run())
    await are_enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return began


async def test_an_interval_lies_between_what_is_due_however_long_a_pass_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = await passes(0.2, 0.5, 6, monkeypatch)
    gaps = [later - earlier for earlier, later in pairwise(began)]
    assert sorted(gaps)[len(gaps) // 2] < 0.6  # 0.7 if each were followed by a whole interval


async def test_a_pass_that_takes_longer_than_its_interval_is_followed_by_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = await passes(0.3, 0.2, 4, monkeypatch)
    assert min(later - earlier for earlier, later in pairwise(began)) >= 0.39

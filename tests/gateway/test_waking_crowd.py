"""A crowd that waits for a service that wakes: the first replica is kept busy, and others get their part."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.gateway.conftest import Received, Replica
from tests.gateway.pools import pool_of, ready, take, wait_for

from headway_gateway.errors import AnswerError
from headway_gateway.lease import Lease
from headway_gateway.pool import BackendPool

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


async def crowd(
    pool: BackendPool, number: int, *, is_streamed: bool = True, within_seconds: float = 30.0
) -> list[asyncio.Task[Lease]]:
    before = pool.num_waiting
    tasks = [
        asyncio.create_task(take(pool, is_streamed=is_streamed, within_seconds=within_seconds))
        for _ in range(number)
    ]
    await wait_for(pool, before + number)
    return tasks


async def given(tasks: list[asyncio.Task[Lease]]) -> list[Lease]:
    """The leases there are, in the order of their requests."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.result() for task in tasks if task.done()]


async def test_the_first_replica_does_not_get_all_of_a_crowd() -> None:
    pool = pool_of()
    tasks = await crowd(pool, 40)
    pool.update(ready("a"))
    first = await given(tasks)
    assert [lease.backend.id for lease in first] == ["a"] * 8
    # Each that begins makes way for two: twice as many are soon under way where prompts are short.
    for lease in first[:4]:
        lease.mark_answered(is_measured=True)
    assert len(await given(tasks)) == 16
    first[4].release()  # its client has gone
    assert len(await given(tasks)) == 17
    pool.update(ready("a", "b"))
    later = (await given(tasks))[17:]
    assert [lease.backend.id for lease in later] == ["b"] * 8
    assert pool.num_waiting == 15


async def test_the_next_crowd_begins_anew_and_newcomers_are_no_crowd() -> None:
    pool = pool_of()
    tasks = await crowd(pool, 10)
    pool.update(ready("a"))
    for lease in await given(tasks):
        lease.mark_answered(is_measured=True)
    assert pool.num_waiting == 0
    newcomers = [await take(pool, is_streamed=True) for _ in range(30)]
    for lease in [*newcomers, *await given(tasks)]:
        lease.release()
    pool.update([])
    tasks = await crowd(pool, 20)
    pool.update(ready("a"))
    assert len(await given(tasks)) == 8


async def test_of_answers_in_one_piece_nobody_knows_when_they_begin() -> None:
    pool = pool_of()
    tasks = await crowd(pool, 40, is_streamed=False)
    pool.update(ready("a"))
    assert len(await given(tasks)) == 40


async def test_whose_time_is_over_is_served_by_a_replica_that_is_busy() -> None:
    pool = pool_of()
    tasks = await crowd(pool, 12, within_seconds=0.2)
    pool.update(ready("a"))
    assert len(await given(tasks)) == 8
    assert len(await asyncio.gather(*tasks)) == 12
    pool = pool_of()
    (task,) = await crowd(pool, 1, within_seconds=0.1)
    with pytest.raises(AnswerError, match="no replica could take it"):
        await task


async def test_a_full_queue_lets_its_first_go_rather_than_refuse_a_newcomer() -> None:
    pool = pool_of(max_waiting=10)
    tasks = await crowd(pool, 10)
    pool.update(ready("a"))
    tasks += await crowd(pool, 8)
    assert (len(await given(tasks)), pool.num_waiting) == (8, 10)
    newcomer = asyncio.create_task(take(pool, is_streamed=True))
    assert (len(await given(tasks)), pool.num_waiting) == (9, 10)
    assert tasks[8].done(), "who came first goes first"
    newcomer.cancel()


async def test_two_replicas_that_compute_one_prompt_after_another_share_a_crowd(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    """The second comes when the first has computed a fifth of them."""
    first, second = await start_replica("first"), await start_replica("second")
    for replica in (first, second):
        computes_one_by_one(replica)
    gateway = await start_gateway()
    pool = gateway.application.pool

    async def post() -> int:
        url = f"{gateway.url}/v1/completions"
        async with client.post(url, json={"stream": True}) as response:
            await response.read()
            return response.status

    requests = [asyncio.create_task(post()) for _ in range(40)]
    await gateway.until(lambda: pool.num_waiting == 40)
    pool.update([first.entry()])
    await gateway.until(lambda: pool.num_waiting <= 40 - 8 - 2 * 8)
    pool.update([first.entry(), second.entry()])
    assert await asyncio.gather(*requests) == [200] * 40
    assert len(second.requests) >= 8
    assert gateway.counters["rejected"] == 0


def computes_one_by_one(replica: Replica) -> None:
    turn = asyncio.Lock()

    async def compute(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        async with turn:
            await asyncio.sleep(0.02)
        writer.write(b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")
        await writer.drain()

    replica.behaviour = compute

"""Whatever replicas and clients do, each request ends exactly once and nothing stays in flight."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import aiohttp
import pytest

if TYPE_CHECKING:
    from tests.gateway.conftest import Received, Replica, StartGateway, StartReplica

pytestmark = pytest.mark.timeout(120)
NUM_REQUESTS = 400


def behave_at_random(replica: Replica, dice: random.Random) -> None:
    """Answers, refuses, dies before the head or in the stream, each as the dice say."""
    answer = replica.behaviour

    async def behave(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = dice.random()
        await asyncio.sleep(dice.random() * 0.02)
        if fate < 0.5:
            await answer(request, reader, writer)
        elif fate < 0.65:
            writer.write(b"HTTP/1.1 503 X\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        elif fate < 0.75:
            writer.close()
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(5):
                writer.write(b"9\r\ndata: x\n\n\r\n")
                await asyncio.sleep(dice.random() * 0.005)
                if dice.random() < 0.05:
                    writer.close()
                    return
            writer.write(b"0\r\n\r\n")

    replica.behaviour = behave


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_exactly_once(
    seed: int, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    dice = random.Random(seed)
    replicas = [await start_replica(name) for name in "abc"]
    for replica in replicas:
        behave_at_random(replica, dice)
    gateway = await start_gateway(max_waiting=40, waiting_timeout_seconds=0.5)
    pool = gateway.application.pool

    async def change_the_list() -> None:
        while True:
            states = [replica.entry(dice.choice(("ready", "ready", "draining"))) for replica in replicas]
            pool.update(dice.sample(states, dice.randint(0, 3)))
            await asyncio.sleep(0.02)

    async def restart_a_replica() -> None:
        while True:
            await asyncio.sleep(0.1)
            await replicas[0].stop()
            await asyncio.sleep(0.05)
            await replicas[0].start()

    async def one_request() -> None:
        await asyncio.sleep(dice.random() * 2)
        patience = dice.random() * 0.2 if dice.random() < 0.2 else 30.0
        try:
            async with asyncio.timeout(patience):
                async with client.post(
                    f"{gateway.url}/v1/completions", data=b"x" * dice.randint(0, 5000)
                ) as response:
                    await response.read()
        except (aiohttp.ClientError, TimeoutError):
            pass  # counted by the gateway, which is what is looked at

    chaos = [asyncio.create_task(change_the_list()), asyncio.create_task(restart_a_replica())]
    await asyncio.gather(*(one_request() for _ in range(NUM_REQUESTS)))
    await gateway.until(lambda: gateway.application.proxy.num_exchanges == 0)
    for task in chaos:
        task.cancel()
    await asyncio.gather(*chaos, return_exceptions=True)

    counters = gateway.counters
    ends = {name: counters[name] for name in ("finished", "rejected", "failed", "client_aborted")}
    assert sum(ends.values()) == counters["received"]
    assert all(ends.values()), ends  # each kind of end has happened
    assert counters["received"] >= NUM_REQUESTS * 0.7
    assert counters["retried"] > 0
    assert "internal_error" not in gateway.application.counters.failed
    assert (pool.num_in_flight, pool.num_waiting) == (0, 0)
    assert sum(backend.in_flight for backend in pool.backends) == 0

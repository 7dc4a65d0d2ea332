"""What counts for and against a revision whose replica hangs, and of clients that do not wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from headway_gateway.counters import RevisionCounts
from headway_gateway.routing import Routing

if TYPE_CHECKING:
    from tests.gateway.conftest import Gateway, Replica, StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)
ROUTING = Routing(100, 30.0, ("demo-new",), {})


async def hanging(
    start_replica: StartReplica, start_gateway: StartGateway, **fields: Any
) -> tuple[Replica, Gateway]:
    replica = await start_replica("demo-new-1")
    replica.streams_by_hand()
    gateway = await start_gateway(replica, **fields)
    gateway.application.pool.route(ROUTING)
    return replica, gateway


def counts(gateway: Gateway) -> RevisionCounts:
    return gateway.application.counters.by_revision.get("demo-new", RevisionCounts())


@pytest.mark.parametrize("has_head", [False, True], ids=["before-the-head", "after-the-head"])
async def test_a_replica_that_hangs_counts_as_an_error_of_its_revision(
    *, has_head: bool, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica, gateway = await hanging(start_replica, start_gateway, idle_timeout_seconds=0.3)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    if has_head:
        await stream.head()
    async with await request as response:
        assert response.status == (502 if has_head else 504)
    assert counts(gateway) == RevisionCounts(requests=1, errors=1)


@pytest.mark.parametrize("has_head", [False, True], ids=["before-the-head", "after-the-head"])
async def test_a_client_that_leaves_before_an_answer_begins_is_counted_apart(
    *, has_head: bool, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica, gateway = await hanging(start_replica, start_gateway)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    if has_head:
        await stream.head()
        await gateway.until(
            lambda: all(exchange.head_at for exchange in gateway.application.proxy._exchanges)
        )
    request.cancel()
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)
    assert counts(gateway) == RevisionCounts(client_aborted=1)


async def test_a_client_that_leaves_in_the_middle_of_an_answer_has_been_counted_already(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica, gateway = await hanging(start_replica, start_gateway)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("data: 1\n\n")
    async with await request as response:
        assert await response.content.readany() == b"data: 1\n\n"
        response.close()
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)
    assert counts(gateway) == RevisionCounts(requests=1)


async def test_a_client_that_leaves_while_no_replica_can_take_it_counts_for_nobody(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica, gateway = await hanging(start_replica, start_gateway)
    await replica.stop()
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    await gateway.until(lambda: gateway.application.pool.num_waiting == 1)
    request.cancel()
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)
    assert counts(gateway) == RevisionCounts()


async def test_an_answer_by_a_revision_that_is_gone_counts_for_none_and_its_series_stay_away(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica, gateway = await hanging(start_replica, start_gateway)
    application = gateway.application
    requests = [asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={})) for _ in range(2)]
    first, last = await replica.next_stream(), await replica.next_stream()
    await first.head()
    await first.end()
    await gateway.until(lambda: counts(gateway).requests == 1)
    routing = Routing(100, 30.0, ("demo-other",), {})
    for _ in range(2):
        application.pool.route(routing)
        application._note_routing(routing)
        application.pool.update([])
    await last.head()
    await last.end()
    for request in requests:
        (await request).close()

    application._note_routing(routing)
    assert application.counters.by_revision == {"": RevisionCounts(requests=1)}
    async with client.get(f"{gateway.url}/metrics") as response:
        page = await response.text()
    assert 'revision="demo-new"' not in page
    assert 'headway_gateway_revision_response_head_seconds_count{revision=""} 1.0' in page
    assert 'headway_gateway_revision_requests_total{revision=""} 1.0' in page

"""A replica whose node is lost: nothing closes its connections but this side's kernel, with ETIMEDOUT."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from multidict import CIMultiDict

from headway_gateway.upstream import LOST_NODE_SECONDS, Upstream, WitnessConnector

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


class Connector(WitnessConnector):
    """Keeps hold of every connection, so that a test can have it end."""

    def __init__(self) -> None:
        super().__init__(limit=0)
        self.transports: list[asyncio.Transport] = []

    async def connect(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the signature is aiohttp's
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        assert connection.transport is not None
        self.transports.append(connection.transport)
        return connection

    def lose_the_node(self) -> None:
        """As the event loop tells it when the kernel has given up the latest connection."""
        transport = self.transports[-1]
        lost = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        assert isinstance(lost, TimeoutError)
        transport.get_protocol().connection_lost(lost)
        transport.abort()


@pytest.mark.parametrize("has_head", [False, True], ids=["before-the-head", "after-the-head"])
async def test_a_request_whose_node_is_lost_goes_to_another_replica(
    *,
    has_head: bool,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
) -> None:
    lost, other = await start_replica("lost"), await start_replica("other")
    lost.streams_by_hand()
    connector = Connector()
    gateway = await start_gateway(lost, other, upstream=Upstream(600.0, connector))
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await lost.next_stream()
    if has_head:
        await stream.head()
        proxy = gateway.application.proxy
        await gateway.until(lambda: all(exchange.head_at for exchange in proxy._exchanges))
    connector.lose_the_node()
    async with await request as response:
        assert (response.status, await response.json()) == (200, {"replica": "other"})
    assert dict(gateway.application.counters.retried) == {"replica_died": 1}


async def test_a_stream_whose_node_is_lost_breaks_off_as_of_a_replica_that_died(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    lost = await start_replica("lost")
    lost.streams_by_hand()
    connector = Connector()
    gateway = await start_gateway(lost, upstream=Upstream(600.0, connector))
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await lost.next_stream()
    await stream.head()
    await stream.send("data: 1\n\n")
    async with await request as response:
        assert await response.content.readany() == b"data: 1\n\n"
        connector.lose_the_node()
        assert b'"code": "replica_died"' in await response.content.read()


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have only some of the options")
async def test_every_connection_to_a_replica_is_watched_by_the_kernel(start_replica: StartReplica) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    upstream = Upstream(600.0)
    asking = asyncio.create_task(
        upstream.send("GET", replica.url, CIMultiDict(), None, on_connected=lambda: None)
    )
    await (await replica.next_stream()).head()
    async with await asking as response:
        assert response.connection is not None
        assert response.connection.transport is not None
        connection = response.connection.transport.get_extra_info("socket")

        def option(name: str) -> int:
            return int(connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)))

        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert option("TCP_USER_TIMEOUT") == LOST_NODE_SECONDS * 1000
        of_probes = option("TCP_KEEPIDLE") + option("TCP_KEEPINTVL") * option("TCP_KEEPCNT")
        assert of_probes == LOST_NODE_SECONDS
    await upstream.close()

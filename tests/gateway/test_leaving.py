"""Who has left and who has not: clients that close half of their connection, and those that send ahead."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gateway.conftest import Gateway, Replica, StartCommand, StartGateway, StartReplica, Table

pytestmark = pytest.mark.timeout(60)


def request(body: bytes = b"{}", *, version: str = "1.1") -> bytes:
    head = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def by_hand(start_replica: StartReplica, start_gateway: StartGateway) -> tuple[Replica, Gateway]:
    """A gateway before a replica whose streams the test sends."""
    replica = await start_replica("a")
    replica.streams_by_hand()
    return replica, await start_gateway(replica)


async def test_who_closes_its_half_after_sending_gets_its_answer(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica, gateway = await by_hand(start_replica, start_gateway)
    reader, writer = await connect(gateway)
    writer.write(request())
    writer.write_eof()
    stream = await replica.next_stream()
    await asyncio.sleep(0.3)
    assert gateway.counters["client_aborted"] == 0
    await stream.head()
    await stream.send("data: 1\n\n")
    await asyncio.sleep(0.1)
    await stream.send("data: 2\n\n")
    await stream.end()
    answer = await reader.read()
    writer.close()
    interim, _, rest = answer.partition(b"HTTP/1.1 200 ")
    assert interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    assert b"data: 1\n\n" in rest
    assert rest.endswith(b"data: 2\n\n\r\n0\r\n\r\n")
    assert gateway.counters["finished"] == 1


async def test_who_closes_its_half_while_it_waits_is_served_when_a_replica_comes(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway()
    reader, writer = await connect(gateway)
    writer.write(request() + request())
    writer.write_eof()
    await gateway.until(lambda: gateway.application.pool.num_waiting == 1)
    await asyncio.sleep(0.3)
    assert gateway.application.pool.num_waiting == 1
    gateway.application.pool.update([replica.entry()])
    answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert gateway.counters["finished"] == 2


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "at-a-replica"])
async def test_who_closes_all_is_gone_at_once(
    *, waits: bool, start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(*([] if waits else [replica]))
    _, writer = await connect(gateway)
    writer.write(request())
    await gateway.until(
        lambda: (gateway.application.pool.num_waiting or gateway.application.pool.num_in_flight) == 1
    )
    closed_at = asyncio.get_running_loop().time()
    writer.close()
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)
    assert asyncio.get_running_loop().time() - closed_at < 1.0


async def test_who_closes_its_half_and_leaves_later_is_gone_then(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica, gateway = await by_hand(start_replica, start_gateway)
    _, writer = await connect(gateway)
    writer.write(request())
    writer.write_eof()
    stream = await replica.next_stream()
    await asyncio.sleep(0.3)
    assert gateway.counters["client_aborted"] == 0
    writer.close()
    await asyncio.wait_for(stream.is_client_gone.wait(), 15)
    assert gateway.counters["client_aborted"] == 1


async def test_who_leaves_while_a_stream_is_silent_is_gone_and_who_closes_its_half_is_not(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica, gateway = await by_hand(start_replica, start_gateway)
    half, half_writer = await connect(gateway)
    half_writer.write(request())
    half_stream = await replica.next_stream()
    gone, gone_writer = await connect(gateway)
    gone_writer.write(request())
    gone_stream = await replica.next_stream()
    for stream, reader in ((half_stream, half), (gone_stream, gone)):
        await stream.head()
        await stream.send("data: 1\n\n")
        await reader.readuntil(b"data: 1\n\n\r\n")
    half_writer.write_eof()
    gone_writer.close()
    await asyncio.wait_for(gone_stream.is_client_gone.wait(), 4)
    await half_stream.send("data: 2\n\n")
    await half_stream.end()
    assert await half.read() == b"3\r\n:\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"
    half_writer.close()
    assert (gateway.counters["finished"], gateway.counters["client_aborted"]) == (1, 1)


async def test_who_breaks_off_in_the_middle_of_a_body_is_gone(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    _, writer = await connect(gateway)
    writer.write(request(bytes(1000))[:-1])
    await gateway.until(lambda: gateway.application.bodies.held_bytes == 1000)
    writer.write_eof()
    await gateway.until(lambda: gateway.application.proxy.num_exchanges == 0)
    assert gateway.counters["received"] == 0
    writer.close()


@pytest.mark.parametrize("sent_ahead", ["many", "much"])
@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_who_sends_ahead_and_leaves_is_not_forgotten(
    sent_ahead: str, how: str, start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica, gateway = await by_hand(start_replica, start_gateway)
    _, writer = await connect(gateway)
    writer.write(request())
    stream = await replica.next_stream()
    # More than is read before it is its turn.
    writer.write(request() * 5000 if sent_ahead == "many" else request(bytes(8_000_000)))
    await asyncio.sleep(0.3)
    if how == "resets":
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.transport.abort()
    await asyncio.wait_for(stream.is_client_gone.wait(), 15)
    assert gateway.counters["client_aborted"] == 1


async def test_who_sends_ahead_is_answered_in_order(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    reader, writer = await connect(gateway)
    bodies = [b'{"n": %d}' % number for number in range(100)]
    writer.write(b"".join(map(request, bodies)))
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200 ") == 101
    assert [one.body for one in replica.requests] == bodies


async def test_of_http_1_0_who_closes_its_half_counts_as_gone(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """It knows no interim responses, so nothing could tell it from who has left."""
    replica, gateway = await by_hand(start_replica, start_gateway)
    _, writer = await connect(gateway)
    writer.write(request(version="1.0"))
    stream = await replica.next_stream()
    writer.write_eof()
    await asyncio.wait_for(stream.is_client_gone.wait(), 15)
    writer.close()


async def test_the_real_command_tells_them_apart_as_well(
    start_replica: StartReplica, start_command: StartCommand, table: Table
) -> None:
    """With the event loop that is installed."""
    replica = await start_replica("a")
    replica.streams_by_hand()
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path))
    port = int(gateway.url.rpartition(":")[2])
    half, half_writer = await asyncio.open_connection("127.0.0.1", port)
    half_writer.write(request())
    half_writer.write_eof()
    half_stream = await replica.next_stream()
    for sent_ahead in (b"", request(bytes(8_000_000))):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request())
        stream = await replica.next_stream()
        writer.write(sent_ahead)
        await asyncio.sleep(0.3)
        writer.transport.abort()
        await asyncio.wait_for(stream.is_client_gone.wait(), 15)
    assert not half_stream.is_client_gone.is_set()
    await half_stream.head()
    await half_stream.end()
    assert b"HTTP/1.1 200 " in await half.read()
    half_writer.close()

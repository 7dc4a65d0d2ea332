"""How much of a request stays in memory, and until when."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)
NUM_BYTES = 8 * 1024 * 1024


async def test_a_body_is_held_no_longer_than_until_its_answer_begins(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)
    tracemalloc.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {NUM_BYTES}\r\n\r\n"
        writer.write(head.encode() + bytes(NUM_BYTES))
        stream = await replica.next_stream()
        assert len(stream.request.body) == NUM_BYTES
        stream.request.body = b""
        await stream.head()
        assert tracemalloc.get_traced_memory()[0] > NUM_BYTES, "a death may yet send it to another replica"
        await stream.send("data: 1\n\n")
        await reader.readuntil(b"data: 1\n\n")
        await gateway.until(lambda: tracemalloc.get_traced_memory()[0] < NUM_BYTES // 2)
        await stream.end()
        assert b"0\r\n\r\n" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    finally:
        tracemalloc.stop()

"""How many connections there may be, who makes room, and what those are told who find none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp
import pytest

from headway_gateway import connections, http_server
from headway_gateway.connections import MOST_BEYOND, SPARE_FILES, Connections, limit_of

if TYPE_CHECKING:
    from tests.gateway.conftest import Gateway, StartCommand, StartGateway, StartReplica, Table

pytestmark = pytest.mark.timeout(60)
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(gateway: Gateway, number: int) -> list[Pair]:
    port = int(gateway.url.rpartition(":")[2])
    before = len(gateway.application.connections)
    made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    await gateway.until(lambda: len(gateway.application.connections) == before + number)
    return made


def close(*pairs: Pair) -> None:
    for _, writer in pairs:
        writer.close()


async def test_beyond_the_limit_requests_are_refused_and_probes_are_answered(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica, max_connections=2)
    busy = await connect(gateway, 2)
    for _, writer in busy:
        writer.write(POST)
    streams = [await replica.next_stream() for _ in busy]
    async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert response.headers["Connection"] == "close"
        error = (await response.json())["error"]
    assert (error["code"], error["message"]) == ("connections", "2 connections are open; retry in a second")
    for path in ("/health", "/ready", "/metrics", "/version"):
        async with client.get(gateway.url + path) as response:
            assert response.status == 200
            assert response.headers["Connection"] == "close"
            page = await response.text()
        if path == "/metrics":
            assert "headway_gateway_connections 3.0\n" in page
            assert "headway_gateway_connections_limit 2.0\n" in page
            assert "headway_gateway_connections_refused_total 1.0\n" in page
    (late,) = await connect(gateway, 1)
    close(busy[0])
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)
    late[1].write(POST)  # a place has become free meanwhile
    streams.append(await replica.next_stream())
    for stream in streams[1:]:
        await stream.head()
        await stream.end()
    for reader, _ in (busy[1], late):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    close(busy[1], late)
    assert gateway.counters["received"] == 3


async def test_a_connection_that_rests_makes_room_and_one_at_work_does_not(
    start_replica: StartReplica, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REST_SECONDS", 0.2)
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica, max_connections=3)
    busy, answered, silent = pairs = await connect(gateway, 3)
    busy[1].write(POST)
    stream = await replica.next_stream()
    answered[1].write(GET_HEALTH)
    assert (await answered[0].readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    await asyncio.sleep(0.3)
    port = int(gateway.url.rpartition(":")[2])
    newcomers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    assert await asyncio.wait_for(silent[0].read(), 10) == b""
    assert await asyncio.wait_for(answered[0].read(), 10) == b""
    for reader, writer in newcomers:
        writer.write(GET_HEALTH)
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"Connection: close" not in answer
    await stream.head()
    await stream.end()
    assert (await busy[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    close(*pairs, *newcomers)


async def test_who_finds_no_place_and_asks_for_nothing_is_closed(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "PLACELESS_SECONDS", 0.1)
    gateway = await start_gateway(max_connections=1)
    (seated,) = await connect(gateway, 1)
    (silent,) = await connect(gateway, 1)
    assert await asyncio.wait_for(silent[0].read(), 10) == b""
    seated[1].write(GET_HEALTH)
    assert (await seated[0].readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    close(seated, silent)


class Named:
    def __init__(self) -> None:
        self.has_given_way = False

    def give_way(self) -> None:
        self.has_given_way = True


def test_those_beyond_are_bounded_and_the_oldest_goes() -> None:
    places = Connections(1, most_beyond=2)
    seated, *beyond = [Named() for _ in range(4)]
    assert places.enter(seated, 0.0)
    places.works(seated)
    assert [places.enter(one, 5.0) for one in beyond] == [False] * 3
    assert [one.has_given_way for one in (seated, *beyond)] == [False, True, False, False]
    assert len(places) == 3
    places.leave(seated)
    assert places.has_place(beyond[1], 5.0)
    assert not places.has_place(beyond[2], 5.0)


@pytest.mark.parametrize(
    ("told", "memory", "files", "want"),
    [
        (None, None, None, 8192),
        (None, 512 * 1024 * 1024, 1_048_576, 4096),
        (20_000, 512 * 1024 * 1024, 1_048_576, 20_000),
        (20_000, None, 20_000, (20_000 - SPARE_FILES - MOST_BEYOND) // 2),
        (None, None, 256, 1),
    ],
    ids=["nothing-known", "by-memory", "as-told", "by-files", "hardly-any-files"],
)
def test_the_limit_is_what_memory_and_files_allow(
    told: int | None, memory: int | None, files: int | None, want: int
) -> None:
    assert limit_of(told, memory, files) == want


async def test_the_real_command_answers_probes_beyond_its_limit(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path), "--max-connections", "20")
    port = int(gateway.url.rpartition(":")[2])
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
    for _, writer in pairs:
        writer.write(POST)
    streams = [await replica.next_stream() for _ in range(20)]
    for _ in range(5):
        async with client.get(f"{gateway.url}/health") as response:
            assert response.status == 200
    for stream in streams:
        await stream.head()
        await stream.end()
    heads = [(await reader.readuntil(b"\r\n\r\n"), reader) for reader, _ in pairs]
    assert sum(head.startswith(b"HTTP/1.1 200 ") for head, _ in heads) == 20
    refused = [json.loads(await reader.read()) for head, reader in heads if b" 503 " in head]
    assert {one["error"]["code"] for one in refused} == {"connections"}
    assert len(refused) == 40
    close(*pairs)

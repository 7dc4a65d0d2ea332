"""Connections that all ask at once, on transports that only write down: whose turn is in which round."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from headway_runtime.server.http_options import HttpOptions
from headway_runtime.server.http_protocol import ServerProtocol
from headway_runtime.server.places import Places
from headway_runtime.server.turnstile import Turnstile

if TYPE_CHECKING:
    from collections.abc import Callable

PER_TURN = 4
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class WritingTransport(asyncio.Transport):
    """What one connection's server side has written, and whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class Crowd:
    """Connections to one server whose application answers with what it is sent.

    begun: the paths of the requests, each with the round of the loop in which its task has run.
    """

    def __init__(self, num_connections: int) -> None:
        self.begun: list[tuple[str, int]] = []
        self.bodies: list[bytes] = []
        self._round = 0
        config = uvicorn.Config(
            self._answer, interface="asgi3", lifespan="off", ws="none", access_log=False, log_config=None
        )
        config.load()
        self._turnstile = Turnstile(PER_TURN)
        self._places = Places(100)
        self._count()
        self.connections = [self._connect(config) for _ in range(num_connections)]

    def _count(self) -> None:
        self._round += 1
        asyncio.get_running_loop().call_soon(self._count)

    def _connect(self, config: uvicorn.Config) -> tuple[ServerProtocol, WritingTransport]:
        protocol = ServerProtocol(
            config,
            ServerState(),
            {},
            options=HttpOptions(),
            places=self._places,
            turnstile=self._turnstile,
            report_refused=lambda _: None,
        )
        transport = WritingTransport()
        protocol.connection_made(transport)
        return protocol, transport

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append((scope["path"], self._round))
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - the rounds are what is counted
                await asyncio.sleep(0)

    def lose_all(self) -> None:
        for protocol, _ in self.connections:
            protocol.connection_lost(None)


async def test_a_crowd_begins_by_handfuls_and_a_probe_does_not_wait_behind_it() -> None:
    crowd = Crowd(21)
    *asking, (probe, probe_transport) = crowd.connections
    for protocol, _ in asking:
        protocol.data_received(POST + b"prompt")
    probe.data_received(GET)
    await crowd.until(lambda: len(crowd.begun) == 21)
    paths = [path for path, _ in crowd.begun]
    assert paths.index("/health") <= PER_TURN, "behind those parsed in the same round at most"
    per_round = Counter(at for path, at in crowd.begun if path != "/health")
    assert max(per_round.values()) == PER_TURN
    assert len(per_round) == 5
    await crowd.until(lambda: all(transport.written for _, transport in asking))
    assert probe_transport.written.startswith(b"HTTP/1.1 200")
    assert all(transport.written.endswith(b"prompt") for _, transport in asking)
    assert not any(transport.is_paused for _, transport in asking), "they may ask again"
    crowd.lose_all()


async def test_what_comes_while_a_request_waits_belongs_to_it() -> None:
    crowd = Crowd(PER_TURN + 1)
    for protocol, _ in crowd.connections:
        protocol.data_received(POST + b"pro")
    late, transport = crowd.connections[-1]
    assert transport.is_paused, "a large body waits outside"
    for protocol, _ in crowd.connections:
        protocol.data_received(b"mpt")  # a TLS layer may have had it already
    await crowd.until(lambda: len(crowd.bodies) == PER_TURN + 1)
    assert set(crowd.bodies) == {b"prompt"}
    assert late.is_idle
    crowd.lose_all()


async def test_a_request_that_waits_is_answered_when_the_server_ends() -> None:
    crowd = Crowd(PER_TURN + 1)
    for protocol, _ in crowd.connections:
        protocol.data_received(POST + b"prompt")
    late, transport = crowd.connections[-1]
    late.shutdown()
    await crowd.until(transport.is_closing)
    assert transport.written.startswith(b"HTTP/1.1 200")
    assert b"\r\nconnection: close\r\n" in transport.written
    await crowd.until(lambda: len(crowd.bodies) == PER_TURN + 1)
    crowd.lose_all()


@pytest.mark.parametrize("how", ["lost", "closing"])
async def test_a_connection_that_ends_while_its_request_waits_begins_nothing(how: str) -> None:
    crowd = Crowd(PER_TURN + 2)
    for protocol, _ in crowd.connections:
        protocol.data_received(POST + b"prompt")
    gone, transport = crowd.connections[PER_TURN]
    if how == "lost":
        gone.connection_lost(None)
    else:
        transport.close()
    await crowd.until(lambda: len(crowd.bodies) == PER_TURN + 1)
    assert len(crowd.begun) == PER_TURN + 1
    assert transport.written == b""
    crowd.connections.remove((gone, transport))
    crowd.lose_all()

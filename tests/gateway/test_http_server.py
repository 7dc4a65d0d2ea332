"""What the HTTP server itself refuses, and that each refusal says what to do."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from headway_gateway import http_server, lifecycle

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def with_headers(number: int) -> bytes:
    lines = "".join(f"X-{index}: 1\r\n" for index in range(number - 1))
    return f"GET /health HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode()


async def answer_to(url: str, sent: bytes) -> tuple[int, Any]:
    """Status and JSON of the one answer, after which the connection must end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


async def test_as_many_headers_are_taken_as_a_replica_takes(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway.url))
    writer.write(with_headers(256))
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
BOTH = "Content-Length and Transfer-Encoding both say how long the body is; send one of them"


@pytest.mark.parametrize(
    ("sent", "status", "code", "want"),
    [
        (with_headers(257), 431, "headers_too_large", "the request has more than 256 headers; send fewer"),
        (
            POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "invalid_http",
            BOTH,
        ),
        (
            POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
            400,
            "invalid_http",
            BOTH,
        ),
        (
            b"GET /v1/m\xc3\xbcdels HTTP/1.1\r\nHost: a\r\n\r\n",
            400,
            "invalid_http",
            "the path has a byte that no URL may have; encode it as %XX",
        ),
        (
            b"GET /health HTTP/1.1\r\nAuthorization: secret\x01\r\n\r\n",
            400,
            "invalid_http",
            "this is not valid HTTP (Invalid header value char); send HTTP/1.1",
        ),
    ],
    ids=["headers", "length-twice", "length-twice-turned", "path", "control-character"],
)
async def test_a_refusal_says_what_to_do(
    sent: bytes, status: int, code: str, want: str, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway()
    got, body = await answer_to(gateway.url, sent)
    assert (got, body["error"]["code"], body["error"]["message"]) == (status, code, want)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "without-an-end"])
async def test_headers_have_a_size_together(*, is_whole: bool, start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    lines = b"".join(b"X-%d: %s\r\n" % (index, b"y" * 10_000) for index in range(7))
    end = b"\r\n" if is_whole else b""
    status, body = await answer_to(gateway.url, b"GET /health HTTP/1.1\r\nHost: a\r\n" + lines + end)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")
    assert "more than 65536 bytes together" in body["error"]["message"]


async def test_a_head_that_does_not_end_in_time_is_answered_and_the_connection_closed(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_SECONDS", 0.2)
    gateway = await start_gateway()
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway.url))
        if before:
            writer.write(before)
            await reader.readuntil(b"}")
        writer.write(b"GET /hea")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 408 " in head.partition(b"\r\n")[0]
        assert json.loads(body)["error"]["code"] == "request_timeout"


async def test_a_bodys_time_and_an_answers_are_not_the_heads(
    start_gateway: StartGateway, start_replica: StartReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_SECONDS", 0.05)
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway.url))
    writer.write(POST + b"Content-Length: 100000\r\n\r\n")
    for _ in range(10):
        writer.write(bytes(10_000))
        await asyncio.sleep(0.02)
    stream = await replica.next_stream()
    assert len(stream.request.body) == 100_000
    # Another head begins while the answer is awaited; it ends only after that.
    writer.write(b"GET /hea")
    await asyncio.sleep(0.2)
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_SECONDS", 20.0)
    await asyncio.sleep(0.1)
    await stream.head()
    await stream.send("data: 1\n\n")
    await stream.end()
    assert (await reader.readuntil(b"data: 1\n\n")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"lth HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await reader.readuntil(b"}")).endswith(b'{"status": "ok"}')
    writer.close()


async def test_empty_lines_between_requests_are_no_head(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_SECONDS", 0.05)
    gateway = await start_gateway()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway.url))
    for _ in range(2):
        writer.write(b"\r\n")
        await asyncio.sleep(0.2)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_connection_on_which_nothing_comes_is_closed(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "KEEP_ALIVE_SECONDS", 0.2)
    gateway = await start_gateway()
    silent, silent_writer = await asyncio.open_connection("127.0.0.1", port_of(gateway.url))
    used, used_writer = await asyncio.open_connection("127.0.0.1", port_of(gateway.url))
    used_writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await used.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    assert await asyncio.wait_for(silent.read(), 20) == await asyncio.wait_for(used.read(), 20) == b""
    silent_writer.close()
    used_writer.close()

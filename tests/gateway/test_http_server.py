"""What the HTTP server itself refuses, and that each refusal says what to do."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway

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

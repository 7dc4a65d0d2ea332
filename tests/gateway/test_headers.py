"""Headers that come in several lines, and those whose bytes are no text."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp
import pytest
from multidict import CIMultiDict

from headway_gateway.headers import to_client, to_replica

if TYPE_CHECKING:
    from tests.gateway.conftest import Received, StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


def test_every_line_of_forwarded_addresses_is_kept_in_order() -> None:
    lines = CIMultiDict(
        [("X-Forwarded-For", "10.0.0.1"), ("Accept", "*/*"), ("X-Forwarded-For", "10.0.0.2, 10.0.0.3")]
    )
    got = to_replica(lines, request_id="r", peer="10.0.0.4")
    assert got.getall("X-Forwarded-For") == ["10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4"]
    assert to_replica(lines, request_id="r", peer=None)["X-Forwarded-For"] == "10.0.0.1, 10.0.0.2, 10.0.0.3"


def test_every_line_of_connection_names_headers_that_stay_behind() -> None:
    lines = CIMultiDict(
        [
            ("Connection", "keep-alive"),
            ("Connection", "X-One, X-Two"),
            ("X-One", "1"),
            ("X-Two", "2"),
            ("X-Three", "3"),
        ]
    )
    for got in (to_replica(lines, request_id="r", peer=None), to_client(lines, request_id="r")):
        assert not {"Connection", "X-One", "X-Two"} & set(got)
        assert got["X-Three"] == "3"


async def test_a_header_that_is_no_text_is_refused_by_name(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Name: Gr\xc3\xbc\xdfe\r\nX-Request-Id: mine\r\n\r\n"
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"X-Request-Id: mine" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http"
    assert error["message"] == "the value of the header 'X-Name' is not UTF-8; encode it, or leave it out"
    assert replica.requests == []


async def test_a_header_of_a_replica_that_is_no_text_is_left_out_with_a_warning(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = await start_replica("a")

    async def answer(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 X\r\nX-Bad: Gr\xfc\xdfe\r\nX-Good: Gr\xc3\xbc\xc3\x9fe\r\n"
            b"Content-Length: 2\r\n\r\nok"
        )

    replica.behaviour = answer
    gateway = await start_gateway(replica)
    async with client.get(f"{gateway.url}/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"ok")
        assert "X-Bad" not in response.headers
        assert response.headers["X-Good"] == "Grüße"
    assert "as they are not UTF-8: X-Bad" in caplog.text

"""What passes through the gateway unchanged, what is changed, and that nothing is held back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp
import pytest
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


async def test_each_streamed_piece_arrives_before_the_next_is_sent(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)

    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={"stream": True}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("data: 0\n\n")  # for which the head has waited
    async with await request as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readany() == b"data: 0\n\n"
        for number in range(1, 5):
            await stream.send(f"data: {number}\n\n")
            assert await response.content.readany() == f"data: {number}\n\n".encode()
        await stream.end()
        assert await response.content.read() == b""
    want = {
        "received": 1,
        "forwarded": 1,
        "finished": 1,
        "rejected": 0,
        "retried": 0,
        "failed": 0,
        "client_aborted": 0,
    }
    assert gateway.counters == want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        pytest.param(b'{"stream": true, "prompt": "hi"}', 1, id="a stream"),
        pytest.param(b'{"prompt":"hi","stream" :\n true}', 1, id="a stream, written otherwise"),
        pytest.param(b'{"prompt": "hi"}', 0, id="one piece"),
        pytest.param(b'{"stream": false, "stream_options": {"include_usage": true}}', 0, id="no stream"),
        pytest.param(b'{"prompt": "say {\\"stream\\": true}"}', 0, id="a text that says so"),
    ],
)
async def test_a_stream_is_awaited_until_its_first_piece_has_come(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    body: bytes,
    want: int,
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", data=body))
    stream = await replica.next_stream()
    (backend,) = gateway.application.pool.backends
    assert (backend.in_flight, backend.num_unanswered) == (1, want)
    await stream.head()
    await stream.send("data: 0\n\n")
    async with await request as response:
        assert await response.content.readany() == b"data: 0\n\n"
        assert (backend.in_flight, backend.num_unanswered) == (1, 0)
        await stream.end()
    await gateway.until(lambda: backend.in_flight == 0)
    assert backend.num_unanswered == 0


@pytest.mark.parametrize(
    ("how", "status"), [("refused", 503), ("replica dies", 502), ("client leaves", None)]
)
async def test_a_stream_that_never_begins_is_awaited_no_longer_than_its_request(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    how: str,
    status: int | None,
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    (backend,) = gateway.application.pool.backends
    behave = {"refused": replica.refuses, "replica dies": replica.dies_before_the_head}
    behave.get(how, replica.streams_by_hand)()
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={"stream": True}))
    if how == "client leaves":
        await replica.next_stream()
        assert (backend.in_flight, backend.num_unanswered) == (1, 1)
        request.cancel()
    else:
        async with await request as response:
            assert response.status == status
    await gateway.until(lambda: backend.in_flight == 0)
    assert backend.num_unanswered == 0


async def test_a_stream_faster_than_its_client_is_slowed_down_and_arrives_whole(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)
    request = asyncio.create_task(client.get(f"{gateway.url}/v1/stream"))
    stream = await replica.next_stream()
    await stream.head()
    piece, num_pieces = "x" * 65536, 1024

    async def flood() -> None:
        for _ in range(num_pieces - 1):
            await stream.send(piece)
        await stream.end()

    await stream.send(piece)

    async with await request as response:
        flooding = asyncio.create_task(flood())
        # With nobody reading, only what fits the buffers on the way gets through: far less than the 64 MiB.
        done, _ = await asyncio.wait((flooding,), timeout=1.0)
        assert not done
        num_bytes = 0
        async for part in response.content.iter_any():
            num_bytes += len(part)
        assert num_bytes == len(piece) * num_pieces
        await flooding


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions?a=b%20c&d=%2F", "/tokenize", "/detokenize", "/openapi.json"]
)
async def test_paths_and_queries_reach_the_replica_as_they_were_sent(
    path: str, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    url = URL(gateway.url + path, encoded=True)
    async with client.post(url, data=b"body") as response:
        assert response.status == 200
        assert await response.json() == {"replica": "a"}
    assert (replica.requests[0].method, replica.requests[0].target) == ("POST", path)
    assert replica.requests[0].body == b"body"


@pytest.mark.parametrize(
    "path", ["/", "/admin/limits", "/v2/models", "/v1", "/v1/%2e%2e/admin/limits", "/v1/x/../../admin/limits"]
)
async def test_paths_outside_the_public_api_never_reach_a_replica(
    path: str, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    async with client.get(URL(gateway.url + path, encoded=True)) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_url"
    assert replica.requests == []


@pytest.mark.parametrize("status", [201, 400, 404, 429, 500])
async def test_a_replicas_own_status_and_body_pass_as_they_are(
    status: int, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.answers(status, {"error": {"message": "mine"}}, {"X-Own": "yes"})
    gateway = await start_gateway(replica)
    async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert response.status == status
        assert response.headers["X-Own"] == "yes"
        assert await response.json() == {"error": {"message": "mine"}}
    assert gateway.counters["finished"] == 1


async def test_head_requests_keep_the_length_of_the_body_they_do_not_have(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    async with client.head(f"{gateway.url}/v1/models") as response:
        assert response.status == 200
        assert response.headers["Content-Length"] == str(len(json.dumps({"replica": "a"})))


async def test_headers_are_forwarded_without_those_of_the_connection(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.answers(
        200, {}, {"Connection": "X-Replica-Hop", "X-Replica-Hop": "1", "X-Kept": "2", "Keep-Alive": "3"}
    )
    gateway = await start_gateway(replica)
    sent = {
        "Authorization": "Bearer secret",
        "User-Agent": "tester/1",
        "X-Forwarded-For": "10.0.0.9",
        "Connection": "keep-alive, X-Client-Hop",
        "X-Client-Hop": "1",
        "TE": "trailers",
        "X-Headway-Waited-Milliseconds": "99999",
        "X-Request-Id": "mine-1",
    }
    async with client.post(f"{gateway.url}/v1/completions", data=b"{}", headers=sent) as response:
        assert response.headers["X-Kept"] == "2"
        assert response.headers["X-Request-Id"] == "mine-1"
        assert not {"X-Replica-Hop", "Keep-Alive"} & set(response.headers)
    got = replica.requests[0].headers
    assert got["authorization"] == "Bearer secret"
    assert got["user-agent"] == "tester/1"
    assert got["x-forwarded-for"] == "10.0.0.9, 127.0.0.1"
    assert got["x-forwarded-host"] == gateway.url.removeprefix("http://")
    assert got["host"] == replica.url.removeprefix("http://")
    assert got["x-request-id"] == "mine-1"
    assert 0 <= float(got["x-headway-waited-milliseconds"]) < 10_000
    assert not {"x-client-hop", "te", "transfer-encoding"} & set(got)


@pytest.mark.parametrize(
    ("location", "want"),
    [
        pytest.param(
            "http://REPLICA/v1/models?a=b%20c#d", "/v1/models?a=b%20c#d", id="the replica's address"
        ),
        pytest.param("//10.0.0.1:8000/v1/models", "/v1/models", id="an address without a scheme"),
        pytest.param("http://10.0.0.1:8000", "/", id="no path"),
        pytest.param("http://10.0.0.1//elsewhere/x", "/elsewhere/x", id="a path like an address"),
        pytest.param("http://[", "/", id="no address"),
        pytest.param("/v1/models?a=b", "/v1/models?a=b", id="a path"),
        pytest.param("models", "models", id="a relative path"),
    ],
)
async def test_no_replicas_address_reaches_a_client_in_a_location(
    location: str,
    want: str,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
) -> None:
    replica = await start_replica("a")
    said = location.replace("REPLICA", replica.url.removeprefix("http://"))
    replica.answers(307, {}, {"Location": said, "Content-Location": said})
    gateway = await start_gateway(replica)
    async with client.post(f"{gateway.url}/v1/models/", data=b"{}", allow_redirects=False) as response:
        assert response.status == 307
        assert response.headers.getall("Location") == [want]
        assert response.headers.getall("Content-Location") == [want]


@pytest.mark.parametrize(
    "given",
    [None, "", "x" * 129, "ünusable", "not ok"],
    ids=["none", "empty", "too long", "not ascii", "not for a replica"],
)
async def test_a_request_without_a_usable_id_gets_one(
    given: str | None, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    headers = {} if given is None else {"X-Request-Id": given}
    async with client.get(f"{gateway.url}/v1/models", headers=headers) as response:
        made = response.headers["X-Request-Id"]
    assert len(made) == 32
    assert replica.requests[0].headers["x-request-id"] == made


@pytest.mark.parametrize("num_bytes", [1_000, 3_000_000], ids=["small", "longer than aiohttp takes as bytes"])
async def test_a_chunked_body_arrives_whole_with_its_length(
    num_bytes: int, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    body = bytes(range(256)) * (num_bytes // 256)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    async with client.post(f"{gateway.url}/v1/completions", data=pieces()) as response:
        assert response.status == 200
    assert replica.requests[0].body == body
    assert replica.requests[0].headers["content-length"] == str(len(body))


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length given", "chunked"])
async def test_too_long_a_body_is_answered_413_and_not_forwarded(
    *,
    is_chunked: bool,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica, max_body_bytes=1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    data = pieces() if is_chunked else b"x" * 1001
    async with client.post(f"{gateway.url}/v1/completions", data=data) as response:
        assert response.status == 413
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert "1000 bytes" in error["message"]
    assert replica.requests == []
    assert gateway.counters["received"] == 0


async def test_a_client_that_asks_first_is_told_to_continue(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    async with client.post(f"{gateway.url}/v1/completions", data=b"hello", expect100=True) as response:
        assert response.status == 200
    assert replica.requests[0].body == b"hello"
    assert "expect" not in replica.requests[0].headers


async def test_connections_to_a_replica_are_used_again(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    for _ in range(10):
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            await response.read()
    assert len(replica.requests) == 10
    assert replica.num_connections == 1


async def test_a_client_that_goes_away_takes_its_request_off_the_replica(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)

    # Before the head.
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    request.cancel()
    await asyncio.wait_for(stream.is_client_gone.wait(), 5)

    # In the middle of the stream.
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("data: 1\n\n")
    response = await request
    await response.content.readany()
    response.close()
    await asyncio.wait_for(stream.is_client_gone.wait(), 5)

    await gateway.until(lambda: gateway.counters["client_aborted"] == 2)
    nothing_else = {"finished": 0, "rejected": 0, "retried": 0, "failed": 0}
    assert gateway.counters == {"received": 2, "forwarded": 1, "client_aborted": 2, **nothing_else}
    assert gateway.application.pool.num_in_flight == 0


async def test_a_client_that_stops_reading_is_given_up(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica, idle_timeout_seconds=0.5)
    request = asyncio.create_task(client.get(f"{gateway.url}/v1/stream"))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("x")
    async with await request:

        async def flood() -> None:
            while True:
                await stream.send("x" * 65536)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(), 20)
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)
    assert gateway.application.pool.num_in_flight == 0

"""What is sent again, what never is, and how the client learns of each failure."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from multidict import CIMultiDictProxy
from openai import APIError, AsyncOpenAI

if TYPE_CHECKING:
    from tests.gateway.conftest import Replica, StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


async def post(client: aiohttp.ClientSession, url: str) -> tuple[int, Any, CIMultiDictProxy[str]]:
    async with client.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
        return response.status, await response.json(), response.headers


async def test_a_replica_that_refuses_connections_costs_nobody_a_request(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gone, alive = await start_replica("gone"), await start_replica("alive")
    gateway = await start_gateway(gone, alive)
    await gone.stop()
    answers = await asyncio.gather(*(post(client, gateway.url) for _ in range(20)))
    assert [(status, body) for status, body, _ in answers] == [(200, {"replica": "alive"})] * 20
    assert gateway.counters["retried"] == gateway.application.counters.retried["connect"] >= 1
    assert gateway.counters["finished"] == 20


async def test_a_replica_that_refused_is_left_alone_and_found_again_when_it_is_back(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    flaky, alive = await start_replica("flaky"), await start_replica("alive")
    gateway = await start_gateway(flaky, alive)
    await flaky.stop()
    for _ in range(4):
        await post(client, gateway.url)
    assert gateway.counters["retried"] == 1  # only the first of the four tried it

    await flaky.start()
    async with asyncio.timeout(20):
        while not flaky.requests:
            assert (await post(client, gateway.url))[0] == 200


async def test_a_request_waits_for_the_only_replica_to_come_back(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica, waiting_timeout_seconds=20)
    await replica.stop()
    requests = [asyncio.create_task(post(client, gateway.url)) for _ in range(5)]
    await gateway.until(lambda: gateway.application.pool.num_waiting == 5)
    await replica.start()
    assert [(await request)[0] for request in requests] == [200] * 5
    assert gateway.counters["rejected"] == 0


async def test_a_refused_request_is_offered_to_each_other_replica_once(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    full, draining, free = [await start_replica(name) for name in ("full", "draining", "free")]
    full.refuses()
    draining.refuses()
    gateway = await start_gateway(full, draining, free)
    status, body, _ = await post(client, gateway.url)
    assert (status, body) == (200, {"replica": "free"})
    assert len(full.requests) == len(draining.requests) == 1
    assert dict(gateway.application.counters.retried) == {"refused": 2}
    # For a moment the two come last, though they have nothing in flight and were used longer ago.
    assert [(await post(client, gateway.url))[1] for _ in range(3)] == [{"replica": "free"}] * 3
    assert len(full.requests) == len(draining.requests) == 1


async def test_the_last_refusal_is_passed_on_with_its_retry_after(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    first, last = await start_replica("first"), await start_replica("last")
    first.refuses("3")
    last.refuses("11")
    gateway = await start_gateway(first, last)
    status, body, headers = await post(client, gateway.url)
    assert (status, body) == (503, {"error": {"message": "last is full"}})
    assert headers["Retry-After"] == "11"
    assert headers["X-Request-Id"] == last.requests[0].headers["x-request-id"]
    assert len(first.requests) == len(last.requests) == 1
    none = {"forwarded": 0, "finished": 0, "failed": 0, "client_aborted": 0}
    assert gateway.counters == {"received": 1, "rejected": 1, "retried": 1, **none}


async def test_where_all_are_full_few_are_asked(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replicas = [await start_replica(f"full-{number}") for number in range(8)]
    for replica in replicas:
        replica.refuses()
    gateway = await start_gateway(*replicas)
    assert (await post(client, gateway.url))[0] == 503
    asked = [len(replica.requests) for replica in replicas]
    assert asked == [1] * 8
    # All have said it just now: three more are as good as eight.
    assert (await post(client, gateway.url))[0] == 503
    assert sum(len(replica.requests) for replica in replicas) == 11


async def test_a_503_without_retry_after_is_the_answer(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    broken, free = await start_replica("broken"), await start_replica("free")
    broken.answers(503, {"error": {"message": "broken"}})
    gateway = await start_gateway(broken, free)
    status, body, _ = await post(client, gateway.url)
    assert (status, body) == (503, {"error": {"message": "broken"}})
    assert free.requests == []
    assert dict(gateway.application.counters.rejected) == {"replica_unavailable": 1}


async def test_a_request_whose_replica_dies_before_the_head_goes_to_another(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    dying, other = await start_replica("dying"), await start_replica("other")
    dying.dies_before_the_head()
    gateway = await start_gateway(dying, other)
    assert [(await post(client, gateway.url))[:2] for _ in range(3)] == [(200, {"replica": "other"})] * 3
    assert dict(gateway.application.counters.retried) == {"replica_died": 1}
    assert gateway.counters["finished"] == 3


async def test_a_stream_whose_replica_dies_after_the_head_and_before_a_byte_goes_to_another(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    dying, other = await start_replica("dying"), await start_replica("other")
    dying.streams_by_hand()
    gateway = await start_gateway(dying, other)
    request = asyncio.create_task(post(client, gateway.url))
    stream = await dying.next_stream()
    await stream.head()
    stream.die()
    assert (await request)[:2] == (200, {"replica": "other"})
    assert dict(gateway.application.counters.retried) == {"replica_died": 1}
    assert gateway.counters["forwarded"] == gateway.counters["finished"] == 1


async def test_two_replicas_dying_of_one_request_before_the_head_are_enough(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    first, second, third = [await start_replica(name) for name in ("first", "second", "third")]
    gateway = await start_gateway(first, second, third)
    for name in ("first", "second", "third"):  # their connections are now used ones
        assert (await post(client, gateway.url))[1] == {"replica": name}
    first.dies_before_the_head()
    second.dies_before_the_head()
    status, body, headers = await post(client, gateway.url)
    assert status == 502
    assert body["error"]["type"] == "server_error"
    assert body["error"]["code"] == "replica_died"
    assert "Retry-After" not in headers
    assert len(third.requests) == 1
    assert dict(gateway.application.counters.rejected) == {"replica_died": 1}
    assert gateway.counters["retried"] == 1


async def test_a_replica_dying_in_mid_stream_ends_the_stream_with_an_error_event(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    dying, other = await start_replica("dying"), await start_replica("other")
    dying.streams_by_hand()
    gateway = await start_gateway(dying, other)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={"stream": True}))
    stream = await dying.next_stream()
    await stream.head()
    await stream.send('data: {"n": 1}\n\n')
    async with await request as response:
        assert await response.content.readany() == b'data: {"n": 1}\n\n'
        stream.die()
        rest = await response.content.read()  # the stream ends in order; the event is what failed
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"\n\n")
    assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "replica_died"
    assert other.requests == []
    assert dict(gateway.application.counters.failed) == {"replica_died": 1}
    assert gateway.counters["finished"] == 0


async def test_a_connection_outlives_a_stream_that_has_failed(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """Were it closed without an announcement, the client's next request could be lost with it."""
    dying, other = await start_replica("dying"), await start_replica("other")
    dying.streams_by_hand()
    gateway = await start_gateway(dying, other)
    trace, num_connections = aiohttp.TraceConfig(), 0

    async def count(*_: object) -> None:
        nonlocal num_connections
        num_connections += 1

    trace.on_connection_create_end.append(count)
    async with aiohttp.ClientSession(trace_configs=[trace]) as keeping:
        request = asyncio.create_task(keeping.post(f"{gateway.url}/v1/completions", json={"stream": True}))
        stream = await dying.next_stream()
        await stream.head()
        await stream.send('data: {"n": 1}\n\n')
        async with await request as response:
            stream.die()
            assert b"replica_died" in await response.read()
        assert (await post(keeping, gateway.url))[:2] == (200, {"replica": "other"})
    assert num_connections == 1


async def test_an_event_cut_in_half_is_closed_before_the_error_event(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    dying = await start_replica("dying")
    dying.streams_by_hand()
    gateway = await start_gateway(dying)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={"stream": True}))
    stream = await dying.next_stream()
    await stream.head()
    await stream.send('data: {"n"')
    async with await request as response:
        assert await response.content.readany() == b'data: {"n"'
        stream.die()
        assert (await response.content.read()).startswith(b'\n\ndata: {"error"')


async def test_the_openai_client_raises_when_a_replica_dies_in_mid_stream(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    dying = await start_replica("dying")
    dying.streams_by_hand()
    gateway = await start_gateway(dying)
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
        request = asyncio.create_task(openai.completions.create(model="m", prompt="p", stream=True))
        stream = await dying.next_stream()
        await stream.head()
        chunk = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
        choice = {"index": 0, "text": "Hi", "finish_reason": None, "logprobs": None}
        await stream.send(f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n")
        texts = []
        with pytest.raises(APIError, match="in the middle of its answer"):  # noqa: PT012
            async for part in await request:
                texts.append(part.choices[0].text)
                stream.die()
    assert texts == ["Hi"]


async def test_a_plain_answer_cut_short_stays_incomplete_for_the_client(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    dying = await start_replica("dying")
    dying.streams_by_hand()
    gateway = await start_gateway(dying)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await dying.next_stream()
    await stream.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\nhalf")
    async with await request as response:
        assert await response.content.readany() == b"half"
        stream.die()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    await gateway.until(lambda: gateway.counters["failed"] == 1)


async def test_a_replica_that_is_silent_before_the_head_is_a_504(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    silent = await start_replica("silent")
    silent.streams_by_hand()
    gateway = await start_gateway(silent, idle_timeout_seconds=0.3)
    status, body, _ = await post(client, gateway.url)
    assert (status, body["error"]["code"]) == (504, "replica_timeout")
    stream = await silent.next_stream()
    await asyncio.wait_for(stream.is_client_gone.wait(), 5)


async def test_a_replica_that_is_silent_after_the_head_is_a_502(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    silent = await start_replica("silent")
    silent.streams_by_hand()
    gateway = await start_gateway(silent, idle_timeout_seconds=0.3)
    request = asyncio.create_task(post(client, gateway.url))
    stream = await silent.next_stream()
    await stream.head()
    status, body, _ = await request
    assert (status, body["error"]["code"]) == (502, "replica_timeout")


async def test_a_replica_that_falls_silent_in_mid_stream_ends_it_with_an_error_event(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    silent = await start_replica("silent")
    silent.streams_by_hand()
    gateway = await start_gateway(silent, idle_timeout_seconds=0.3)
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await silent.next_stream()
    await stream.head()
    await stream.send('data: {"n": 1}\n\n')
    async with await request as response:
        assert b'"code": "replica_timeout"' in await response.content.read()
    await asyncio.wait_for(stream.is_client_gone.wait(), 5)


async def test_an_answer_that_is_not_http_is_a_502(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    odd, other = await start_replica("odd"), await start_replica("other")
    odd.streams_by_hand()
    gateway = await start_gateway(odd, other)
    request = asyncio.create_task(post(client, gateway.url))
    stream = await odd.next_stream()
    await stream.raw(b"SSH-2.0-nonsense\r\n\r\n")
    status, body, _ = await request
    assert (status, body["error"]["code"]) == (502, "replica_answer")
    assert other.requests == []


async def test_a_replica_that_closes_every_new_connection_is_given_up_in_time(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    await _close_every_connection(replica)
    gateway = await start_gateway(replica, waiting_timeout_seconds=1.0)
    status, _, _ = await post(client, gateway.url)
    assert status in (
        502,
        503,
    )  # a reset proves nothing and ends it; an orderly close is tried until the time is up
    assert replica.num_connections < 50


async def _close_every_connection(replica: Replica) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica.num_connections += 1
        writer.close()

    await replica.stop()
    replica.accept = close
    await replica.start()

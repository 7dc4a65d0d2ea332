"""How much of a request stays in memory, and until when."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from headway_gateway.errors import BodyError
from headway_gateway.exchange import Exchange
from headway_gateway.held_bodies import LARGEST_SMALL_BYTES, BodyBudget, HeldBody, limit_of
from headway_gateway.memory_limit import container_memory_bytes

if TYPE_CHECKING:
    from tests.gateway.conftest import Gateway, StartGateway, StartReplica

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


def posted(num_bytes: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {num_bytes}\r\n\r\n"
    return head.encode() + bytes(num_bytes)


async def test_a_body_is_in_memory_once_and_gone_as_soon_as_its_client_is(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica)
    gc.disable()  # else it might be what frees the memory, a while later
    tracemalloc.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(posted(NUM_BYTES))
        stream = await replica.next_stream()
        stream.request.body = b""
        assert gateway.application.bodies.held_bytes == NUM_BYTES
        assert tracemalloc.get_traced_memory()[0] < NUM_BYTES * 1.5
        writer.close()
        await stream.is_client_gone.wait()
        assert gateway.application.bodies.held_bytes == 0
        await gateway.until(lambda: tracemalloc.get_traced_memory()[0] < NUM_BYTES // 2)
    finally:
        tracemalloc.stop()
        gc.enable()


def num_exchanges() -> int:
    # By type: others' objects may warn when they are asked for their class.
    return sum(type(one) is Exchange for one in gc.get_objects())


@pytest.mark.parametrize("case", ["answered", "streamed", "refused", "died-once", "died-twice"])
async def test_a_request_that_has_ended_leaves_nothing_to_the_garbage_collector(
    case: str, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replicas = [await start_replica(name) for name in "ab"]
    gateway = await start_gateway(*replicas)
    for replica in replicas[:1] if case == "died-once" else replicas:
        if case == "streamed":
            replica.streams_by_hand()
        elif case == "refused":
            replica.refuses()
        elif case != "answered":
            replica.dies_before_the_head()

    async def post() -> int:
        async with client.post(f"{gateway.url}/v1/completions", data=b"{}") as response:
            await response.read()
            return response.status

    gc.collect()
    gc.disable()
    try:
        num_before = num_exchanges()
        posted = asyncio.create_task(post())
        if case == "streamed":
            stream = await replicas[0].next_stream()
            await stream.head()
            await stream.send("data: 1\n\n")
            await stream.end()
        assert await posted == {"refused": 503, "died-twice": 502}.get(case, 200)
        await gateway.until(lambda: num_exchanges() == num_before)
    finally:
        gc.enable()


async def test_an_answer_that_begins_before_the_body_is_read_is_passed_on_whole(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    let_go, size = asyncio.Event(), 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal size
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\n{")
        await let_go.wait()
        while size < NUM_BYTES:
            size += len(await reader.read(65536))
        writer.write(b"}")
        await writer.drain()
        writer.close()

    await replica.stop()
    replica.accept = accept
    await replica.start()
    gateway = await start_gateway(replica)
    async with client.post(f"{gateway.url}/v1/completions", data=io.BytesIO(bytes(NUM_BYTES))) as response:
        assert (response.status, await response.content.read(1)) == (400, b"{")
        let_go.set()
        assert await response.content.read() == b"}"
    assert size == NUM_BYTES


async def body_gauges(gateway: Gateway, client: aiohttp.ClientSession) -> dict[str, float]:
    async with client.get(f"{gateway.url}/metrics") as response:
        lines = [line.split() for line in (await response.text()).splitlines()]
    names = ("headway_gateway_body_bytes", "headway_gateway_bodies_refused_total")
    return {line[0].removeprefix("headway_gateway_"): float(line[1]) for line in lines if line[0] in names}


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with-a-length", "in-chunks"])
async def test_bodies_beyond_the_budget_are_refused_and_small_ones_go_on(
    *,
    is_chunked: bool,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    gateway = await start_gateway(replica, max_held_bytes=4_000_000)
    large = bytes(1_000_000)

    async def pieces() -> Any:
        for start in range(0, len(large), 100_000):
            yield large[start : start + 100_000]

    async def post(data: Any) -> tuple[int, str | None, Any]:
        async with client.post(f"{gateway.url}/v1/completions", data=data) as response:
            body = await response.read()
            return response.status, response.headers.get("Retry-After"), body

    held = [asyncio.create_task(post(pieces() if is_chunked else large)) for _ in range(3)]
    streams = [await replica.next_stream() for _ in held]
    assert await body_gauges(gateway, client) == {"body_bytes": 3e6, "bodies_refused_total": 0}
    status, retry_after, answer = await post(pieces() if is_chunked else large)
    assert (status, retry_after) == (503, "2")
    error = json.loads(answer)["error"]
    assert error["code"] == "body_memory_full"
    assert "than the 3000000 that they may (--max-held-bytes=4000000)" in error["message"]
    assert await body_gauges(gateway, client) == {"body_bytes": 3e6, "bodies_refused_total": 1}
    small = asyncio.create_task(post(b"{}"))
    streams.append(await replica.next_stream())
    for stream in streams:
        await stream.head()
        await stream.send("data: 1\n\n")
    await gateway.until(lambda: gateway.application.bodies.held_bytes == 0)
    again = asyncio.create_task(post(large))
    streams.append(await replica.next_stream())
    await streams[-1].head()
    for stream in streams:
        await stream.end()
    assert [status for status, _, _ in await asyncio.gather(*held, small, again)] == [200] * 5
    assert gateway.counters["received"] == 5, "what is refused was never received"


async def test_who_leaves_in_the_middle_of_a_body_leaves_no_bytes(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(posted(1000)[:-1])
    await gateway.until(lambda: gateway.application.bodies.held_bytes == 1000)
    writer.close()
    await gateway.until(lambda: gateway.application.bodies.held_bytes == 0)


async def test_who_uploads_slowly_keeps_room_for_what_has_come(
    start_replica: StartReplica, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_gateway.held_bodies.ANNOUNCED_SECONDS", 0.05)
    gateway = await start_gateway(await start_replica("a"), max_held_bytes=2_000_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    request, bodies = posted(1_000_000), gateway.application.bodies
    writer.write(request[:-900_000])
    await gateway.until(lambda: bodies.held_bytes == 100_000)
    writer.write(request[-900_000:-800_000])
    await gateway.until(lambda: bodies.held_bytes == 200_000)
    writer.write(request[-800_000:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await gateway.until(lambda: bodies.held_bytes == 0)
    writer.close()


def held_body(budget: BodyBudget, num_bytes: int) -> HeldBody:
    body = HeldBody(budget)
    body.make_room(num_bytes)
    return body


def test_a_large_body_is_taken_alone_whatever_its_size() -> None:
    budget = BodyBudget(400_000)
    small = held_body(budget, 10_000)
    large = held_body(budget, 16_000_000)
    with pytest.raises(BodyError):
        held_body(budget, LARGEST_SMALL_BYTES + 1)
    others = [held_body(budget, LARGEST_SMALL_BYTES)]
    with pytest.raises(BodyError, match="bodies have 16075536 bytes"):
        held_body(budget, LARGEST_SMALL_BYTES)
    assert (budget.held_bytes, budget.num_refused) == (16_000_000 + 10_000 + LARGEST_SMALL_BYTES, 2)
    large.drop()
    large.drop()
    others += [held_body(budget, 100_000), held_body(budget, 200_000)]
    for body in (small, *others):
        body.drop()
    assert budget.held_bytes == 0


def test_a_body_that_grows_large_is_counted_once() -> None:
    budget = BodyBudget(400_000)
    body = HeldBody(budget)
    for num_bytes in (10_000, 60_000, 120_000, 110_000, 250_000):
        body.make_room(num_bytes)
    assert budget.held_bytes == 250_000
    other = held_body(budget, 40_000)
    with pytest.raises(BodyError):
        other.make_room(100_000)
    assert budget.held_bytes == 290_000, "what it had stays until it is dropped"
    body.drop()
    other.drop()
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    ("files", "groups", "want"),
    [
        ({"memory.max": "536870912\n"}, "0::/\n", 536870912),
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}, "0::/a/b\n", 1000),
        (
            {"memory/x/memory.limit_in_bytes": "2000\n", "memory/memory.limit_in_bytes": f"{2**63 - 4096}"},
            "9:cpu,cpuacct:/x\n8:memory:/x\n",
            2000,
        ),
        ({"memory/memory.limit_in_bytes": "3000\n"}, "8:memory:/kubepods/pod\n", 3000),
        ({}, "0::/../../elsewhere\n", None),
        ({}, None, None),
    ],
    ids=["own", "none", "above", "version-1", "version-1-in-a-container", "not-to-be-seen", "no-linux"],
)
def test_the_containers_memory_is_what_its_control_groups_say(
    files: dict[str, str], groups: str | None, want: int | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    own = tmp_path / "cgroup"
    if groups is not None:
        own.write_text(groups)
    got = container_memory_bytes(tmp_path / "groups", own)
    assert got == want
    assert limit_of(got) == (want // 2 if want else 256 * 1024 * 1024)

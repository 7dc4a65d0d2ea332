"""Who waits while no replica can take a request, for how long, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.gateway.conftest import Replica
from tests.gateway.pools import pool_of, ready, take, wait_for

from headway_gateway.backend import BackendEntry
from headway_gateway.errors import AnswerError
from headway_gateway.lease import Lease
from headway_gateway.pool import BackendPool

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


async def test_those_who_wait_are_woken_in_the_order_they_came() -> None:
    pool = pool_of()
    order: list[int] = []

    async def wait(number: int) -> None:
        await take(pool)
        order.append(number)

    tasks = []
    for number in range(20):
        tasks.append(asyncio.create_task(wait(number)))
        await wait_for(pool, number + 1)
    pool.update(ready("a"))
    assert pool.num_waiting == 0
    late = asyncio.create_task(wait(99))
    await asyncio.gather(*tasks, late)
    assert order == [*range(20), 99]


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    pool = pool_of("a")
    with await take(pool) as lease:
        lease.mark_unreachable()
    first = asyncio.create_task(take(pool))
    await wait_for(pool, 1)
    (backend,) = pool.backends
    backend.is_suspect = False  # its rest is over, but nobody has been woken yet
    newcomer = asyncio.create_task(take(pool))
    await wait_for(pool, 2)
    pool.wake_waiting()
    assert (await first).was_held
    await newcomer


async def test_waiting_ends_with_503_at_the_deadline() -> None:
    pool = pool_of()
    with pytest.raises(AnswerError) as caught:
        await take(pool, within_seconds=0.05)
    assert (caught.value.status, caught.value.reason) == (503, "waiting_timeout")
    assert caught.value.retry_after_seconds is not None
    assert pool.num_waiting == 0
    assert "(" not in str(caught.value)


async def test_who_waits_in_vain_is_told_what_the_replicas_do() -> None:
    pool = pool_of(max_waiting=1)
    pool.update([], "demo-0: fetching hf://acme/model: 1.00 of 2.00 GB, 0 of 2 files")
    held = asyncio.create_task(take(pool, within_seconds=0.1))
    await wait_for(pool, 1)
    with pytest.raises(AnswerError, match=r"no replica is ready \(demo-0: fetching hf://acme/model: 1.00 of"):
        await take(pool)
    with pytest.raises(AnswerError, match=r"s \(demo-0: fetching hf://acme/model: 1.00 of 2.00 GB, 0 of 2 f"):
        await held
    pool.update([])
    with pytest.raises(AnswerError) as caught:
        await take(pool, within_seconds=0.01)
    assert "fetching" not in str(caught.value)


async def test_a_full_queue_rejects_at_once() -> None:
    pool = pool_of(max_waiting=2)
    waiting = [asyncio.create_task(take(pool)) for _ in range(2)]
    await wait_for(pool, 2)
    with pytest.raises(AnswerError) as caught:
        await take(pool)
    assert (caught.value.status, caught.value.reason) == (503, "waiting_queue_full")
    pool.update(ready("a"))
    assert len(await asyncio.gather(*waiting)) == 2


async def test_bodies_that_wait_have_no_more_bytes_than_they_may() -> None:
    pool = BackendPool(100, max_waiting_bytes=1000)
    pool.update([])

    async def wait(num_bytes: int) -> Lease | None:
        return await pool.acquire(refused_by=(), since=asyncio.get_running_loop().time(), num_bytes=num_bytes)

    # Alone it waits whatever its size, and nobody with it who would make it more.
    large = asyncio.create_task(wait(5000))
    await wait_for(pool, 1)
    with pytest.raises(AnswerError, match="requests of 5000 bytes wait already, with which this one's 1 are"):
        await wait(1)
    large.cancel()
    await wait_for(pool, 0)
    held = [asyncio.create_task(wait(num_bytes)) for num_bytes in (600, 400, 0)]
    await wait_for(pool, 3)
    assert pool.num_waiting_bytes == 1000
    with pytest.raises(AnswerError) as caught:
        await wait(1)
    assert (caught.value.status, caught.value.reason) == (503, "waiting_queue_full")
    assert caught.value.retry_after_seconds is not None
    pool.update(ready("a"))
    assert len(await asyncio.gather(*held)) == 3
    assert pool.num_waiting_bytes == 0


async def test_one_that_gives_up_waiting_leaves_nothing_behind() -> None:
    pool = pool_of()
    first, second = asyncio.create_task(take(pool)), asyncio.create_task(take(pool))
    await wait_for(pool, 2)
    first.cancel()
    await wait_for(pool, 1)
    pool.update(ready("a"))
    assert (await second).backend.id == "a"
    assert pool.num_in_flight == 1


async def test_one_that_gives_up_in_the_moment_of_waking_gives_its_lease_back() -> None:
    pool = pool_of()
    task = asyncio.create_task(take(pool))
    await wait_for(pool, 1)
    pool.update(ready("a"))
    assert pool.num_in_flight == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.num_in_flight == 0


async def test_held_requests_are_served_in_order_when_the_first_replica_appears(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway()
    pool = gateway.application.pool

    async def post(number: int) -> int:
        async with client.post(f"{gateway.url}/v1/completions", data=str(number)) as response:
            return response.status

    requests = []
    for number in range(10):
        requests.append(asyncio.create_task(post(number)))
        await gateway.until(lambda want=number + 1: pool.num_waiting == want)  # type: ignore[misc]
    await asyncio.sleep(0.05)
    assert pool.oldest_waiting_seconds() > 0.05
    pool.update([replica.entry()])
    assert await asyncio.gather(*requests) == [200] * 10
    waited = [float(request.headers["x-headway-waited-milliseconds"]) for request in replica.requests]
    assert all(milliseconds >= 50 for milliseconds in waited)
    by_arrival = [int(request.body) for request in replica.requests]
    assert sorted(by_arrival) == list(range(10))
    assert by_arrival[0] == 0


async def test_a_request_that_no_replica_came_for_is_rejected_with_retry_after(
    start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway(waiting_timeout_seconds=0.1)
    async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "waiting_timeout")
    want = {
        "received": 1,
        "rejected": 1,
        "forwarded": 0,
        "finished": 0,
        "retried": 0,
        "failed": 0,
        "client_aborted": 0,
    }
    assert gateway.counters == want


async def test_no_more_than_max_waiting_requests_are_held(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(max_waiting=3)

    async def post() -> int:
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            return response.status

    requests = [asyncio.create_task(post()) for _ in range(8)]
    await gateway.until(lambda: gateway.counters["rejected"] == 5)
    assert gateway.application.pool.num_waiting == 3
    gateway.application.pool.update([replica.entry()])
    assert sorted(await asyncio.gather(*requests)) == [200] * 3 + [503] * 5


async def test_waking_requests_are_held_up_to_a_number_of_bytes(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(max_waiting_bytes=250)

    async def post() -> tuple[int, str | None]:
        async with client.post(f"{gateway.url}/v1/completions", data=b"x" * 100) as response:
            return response.status, response.headers.get("Retry-After")

    async def gauges() -> dict[str, float]:
        async with client.get(f"{gateway.url}/metrics") as response:
            lines = [line.split() for line in (await response.text()).splitlines()]
        return {line[0]: float(line[1]) for line in lines if line[0].startswith("headway_gateway_waiting")}

    requests = [asyncio.create_task(post()) for _ in range(5)]
    await gateway.until(lambda: gateway.counters["rejected"] == 3)
    held = {"headway_gateway_waiting": 2.0, "headway_gateway_waiting_bytes": 200.0}
    assert await gauges() == {**held, "headway_gateway_waiting_bytes_limit": 250.0}
    gateway.application.pool.update([replica.entry()])
    answers = await asyncio.gather(*requests)
    assert sorted(answers, key=str) == [(200, None)] * 2 + [(503, "2")] * 3
    assert (await gauges())["headway_gateway_waiting_bytes"] == 0


async def test_a_gateway_that_ends_holds_nobody_for_whom_no_replica_is_ready(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway()
    held = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    await gateway.until(lambda: gateway.application.pool.num_waiting == 1)
    gateway.application.proxy.is_draining = True
    async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert response.headers["Connection"] == "close"
        assert (await response.json())["error"]["code"] == "shutting_down"
    gateway.application.pool.update([replica.entry()])
    async with await held as response:
        assert response.status == 200, "held before, and served since a replica came"
    async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert response.status == 200
    assert dict(gateway.application.counters.rejected) == {"shutting_down": 1}


async def test_a_client_that_leaves_while_it_waits_is_not_sent_to_a_replica(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway()
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    await gateway.until(lambda: gateway.application.pool.num_waiting == 1)
    request.cancel()
    await gateway.until(lambda: gateway.application.pool.num_waiting == 0)
    gateway.application.pool.update([replica.entry()])
    assert replica.requests == []
    await gateway.until(lambda: gateway.counters["client_aborted"] == 1)


async def test_prompts_of_those_who_waited_count_as_soon_as_they_are_given_away() -> None:
    pool = pool_of("a")
    for _ in range(18):
        (await take(pool, is_streamed=True)).mark_answered(is_measured=True)
    pool.update([BackendEntry("a", "http://a:1", "unready")])
    tasks = [asyncio.create_task(take(pool, is_streamed=True)) for _ in range(14)]
    await wait_for(pool, 14)
    pool.update(ready("a", "b"))
    given = Counter([lease.backend.id for lease in await asyncio.gather(*tasks)])
    assert given == {"b": 8, "a": 6}
    assert {one.id: one.num_unanswered for one in pool.backends} == given


async def test_who_comes_back_from_a_replica_is_where_it_was_in_the_queue_however_full() -> None:
    pool = pool_of(max_waiting=3)
    now = asyncio.get_running_loop().time()

    async def wait(since: float, *, is_again: bool = False) -> Lease | None:
        return await pool.acquire(refused_by=(), since=since, is_again=is_again)

    held = [asyncio.create_task(wait(now - 3 + number)) for number in range(3)]
    await wait_for(pool, 3)
    back = asyncio.create_task(wait(now - 4, is_again=True))
    await wait_for(pool, 4)
    with pytest.raises(AnswerError, match="4 requests wait already"):
        await wait(now)
    order: list[int] = []
    for number, task in enumerate([back, *held]):
        task.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    pool.update(ready("a"))
    await asyncio.gather(back, *held)
    assert order == [0, 1, 2, 3]


async def test_who_comes_back_late_has_time_for_a_replica_to_come_back() -> None:
    pool = pool_of()
    long_ago = asyncio.get_running_loop().time() - 1000.0
    with pytest.raises(AnswerError):
        await pool.acquire(refused_by=(), since=long_ago)
    until = asyncio.get_running_loop().time() + 30.0
    back = asyncio.create_task(pool.acquire(refused_by=(), since=long_ago, least_until=until))
    await wait_for(pool, 1)
    pool.route(replace(pool.routing, waiting_timeout_seconds=1.0))
    await asyncio.sleep(0.05)
    pool.update(ready("a"))
    lease = await back
    assert lease is not None
    assert lease.backend.id == "a"


async def test_whom_the_first_replica_has_no_room_for_waits_on(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    """A service that wakes up: sixty wait, the first replica takes ten, the second comes a moment later."""
    first, second = await start_replica("first"), await start_replica("second")
    gateway = await start_gateway()
    pool = gateway.application.pool
    taken = refused = 0
    let_go = asyncio.Event()
    answer, refuse = first.behaviour, Replica("first")
    refuse.refuses()

    async def take_ten(*request: Any) -> None:
        nonlocal taken, refused
        if taken == 10:
            refused += 1
            await refuse.behaviour(*request)
            return
        taken += 1
        await let_go.wait()
        taken -= 1
        await answer(*request)

    first.behaviour = take_ten

    async def post() -> int:
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            return response.status

    requests = [asyncio.create_task(post()) for _ in range(60)]
    await gateway.until(lambda: pool.num_waiting == 60)
    pool.update([first.entry()])
    await gateway.until(lambda: taken == 10 and pool.num_waiting == 50)
    assert refused == 50
    # It is asked again now and then, by one at a time.
    await gateway.until(lambda: refused == 52)
    assert pool.num_waiting >= 49
    newcomer = asyncio.create_task(post())
    pool.update([first.entry(), second.entry()])
    await gateway.until(lambda: pool.num_waiting == 0)
    await gateway.until(lambda: len(second.requests) >= 49)
    let_go.set()
    assert await asyncio.gather(*requests, newcomer) == [200] * 61
    assert gateway.counters["rejected"] == 0


async def test_a_replica_that_had_no_room_is_given_more_as_it_has() -> None:
    pool = pool_of()
    held = [asyncio.create_task(take(pool)) for _ in range(12)]
    await wait_for(pool, 12)
    pool.update(ready("a"))
    leases = await asyncio.gather(*held)

    async def wait_on(lease: Lease) -> Lease | None:
        since = asyncio.get_running_loop().time()
        return await pool.acquire(refused_by=[lease.backend], since=since, is_again=True, was_held=True)

    refused = []
    for lease in leases[2:]:
        lease.mark_busy()
        refused.append(asyncio.create_task(wait_on(lease)))
        lease.release()
    await wait_for(pool, 10)
    leases[0].mark_taken(is_error=False)  # two for one that it takes
    assert pool.num_waiting == 8
    leases[0].release()  # and one for one that it has answered
    assert pool.num_waiting == 7
    # Who gets a turn and makes no use of it leaves it to the next.
    for task in refused:
        given = await task
        assert given is not None
        given.release()
    assert pool.num_waiting == 0
    assert next(iter(pool.backends)).room is None

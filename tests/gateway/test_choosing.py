"""Which replica takes a request, and who waits while none can."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import aiohttp
import pytest

from headway_gateway.backend import UNANSWERED_WEIGHT, Backend, BackendEntry
from headway_gateway.errors import AnswerError
from headway_gateway.pool import BackendPool, Lease
from headway_simulator import pods

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


def ready(*names: str) -> list[BackendEntry]:
    return [BackendEntry(name, f"http://{name}:1", "ready") for name in names]


def pool_of(*names: str, max_waiting: int = 100) -> BackendPool:
    pool = BackendPool(max_waiting)
    pool.update(ready(*names))
    return pool


async def take(pool: BackendPool, *, within_seconds: float = 30.0) -> Lease:
    until = asyncio.get_running_loop().time() + within_seconds
    since = until - pool.routing.waiting_timeout_seconds
    lease = await pool.acquire(refused_by=(), since=since)
    assert lease is not None
    return lease


async def wait_for(pool: BackendPool, num_waiting: int) -> None:
    while pool.num_waiting != num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_the_backend_with_the_fewest_requests_in_flight_takes_the_next() -> None:
    pool = pool_of("a", "b", "c")
    leases = [await take(pool) for _ in range(9)]
    assert Counter(lease.backend.id for lease in leases) == {"a": 3, "b": 3, "c": 3}
    of_b = [lease for lease in leases if lease.backend.id == "b"]
    for lease in of_b:
        lease.release()
    assert [(await take(pool)).backend.id for _ in range(3)] == ["b", "b", "b"]


async def test_among_equals_the_one_used_longest_ago_takes_the_next() -> None:
    pool = pool_of("a", "b", "c")
    names = []
    for _ in range(6):
        lease = await take(pool)
        names.append(lease.backend.id)
        lease.release()
    assert names == ["a", "b", "c", "a", "b", "c"]


async def test_a_new_backend_takes_requests_until_it_is_as_loaded_as_the_others() -> None:
    pool = pool_of("old")
    for _ in range(4):
        await take(pool)
    pool.update(ready("old", "new"))
    assert [(await take(pool)).backend.id for _ in range(6)] == ["new", "new", "new", "new", "old", "new"]


async def stream(pool: BackendPool) -> Lease:
    lease = await take(pool)
    lease.mark_unanswered()
    return lease


async def test_a_new_backend_is_not_given_prompts_faster_than_it_answers_them() -> None:
    pool = pool_of("old")
    for _ in range(72):
        (await stream(pool)).mark_answered()
    pool.update(ready("old", "new"))
    first = [await stream(pool) for _ in range(10)]
    # Eight prompts stand for as many requests as the old one answers.
    assert [lease.backend.id for lease in first] == [*["new"] * 8, "old", "new"]
    for lease in first:
        lease.mark_answered()
    assert {(await stream(pool)).backend.id for _ in range(6)} == {"new"}


def test_the_simulator_counts_as_the_gateway_does() -> None:
    assert pods.UNANSWERED_WEIGHT == UNANSWERED_WEIGHT
    pod, backend = pods.Pod("a", 0.0), Backend("a", "http://a:1", "ready")
    for in_flight, num_unanswered, num_late in (
        (0, 0, 0.0),
        (7, 2, 0.0),
        (7, 5, 4.0),
        (7, 2, 4.5),
        (5, 5, 6.0),
    ):
        for one in (pod, backend):
            one.in_flight, one.num_unanswered, one.num_late = in_flight, num_unanswered, num_late
        assert pod.load == backend.load


async def test_one_that_has_a_prompt_to_compute_comes_after_one_that_answers_a_few_more() -> None:
    pool = pool_of("a", "b")
    leases = [await stream(pool) for _ in range(8)]
    for lease in leases:
        lease.mark_answered()
        lease.mark_answered()  # twice is once
    next(lease for lease in leases if lease.backend.id == "a").release()
    assert (await stream(pool)).backend.id == "a"
    # Now both have four, of which "a" has yet to begin with one.
    assert [(await stream(pool)).backend.id for _ in range(2)] == ["b", "a"]
    assert [backend.num_unanswered for backend in pool.backends] == [2, 1]


async def test_a_request_that_ends_without_an_answer_is_not_awaited_any_more() -> None:
    pool = pool_of("a")
    leases = [await stream(pool) for _ in range(3)]
    leases[0].mark_answered()
    for lease in leases:
        lease.release()
        lease.mark_answered()
        lease.mark_unanswered()
    (backend,) = pool.backends
    assert (backend.num_unanswered, backend.load) == (0, 0.0)


async def test_requests_that_let_others_pass_are_not_counted() -> None:
    pool = pool_of("a", "b")
    leases = [await take(pool) for _ in range(20)]
    next(one for one in leases if one.backend.id == "a").mark_late_share(0.8)
    # Two of the ten at "a" are met by a new one, and all that come now.
    assert Counter([(await take(pool)).backend.id for _ in range(10)]) == {"a": 9, "b": 1}
    next(one for one in leases if one.backend.id == "a").mark_late_share(0.5)
    assert [(await take(pool)).backend.id for _ in range(3)] == ["b", "b", "b"]


async def test_what_was_late_is_forgotten_with_the_requests_and_with_the_replica() -> None:
    pool = pool_of("a")
    leases = [await take(pool) for _ in range(10)]
    (backend,) = pool.backends
    leases[0].mark_late_share(0.8)
    for lease in leases[:5]:
        lease.release()
    assert (backend.num_late, backend.load) == pytest.approx((4.0, 1.0))
    leases[5].mark_unreachable()
    assert backend.load == backend.in_flight == 5


@pytest.mark.parametrize("state", ["draining", "unready"])
async def test_a_backend_that_is_not_ready_gets_nothing_new_but_keeps_what_it_has(state: str) -> None:
    pool = pool_of("a", "b")
    of_a = await take(pool)
    pool.update([BackendEntry("a", "http://a:1", state), *ready("b")])  # type: ignore[arg-type]
    assert [(await take(pool)).backend.id for _ in range(3)] == ["b", "b", "b"]
    assert pool.num_in_flight == 4
    of_a.release()
    assert pool.num_in_flight == 3


async def test_a_backend_that_leaves_the_list_is_no_longer_counted_as_one() -> None:
    pool = pool_of("a", "b")
    lease = await take(pool)
    pool.update(ready("b"))
    assert (len(pool.backends), pool.num_ready, pool.num_in_flight) == (1, 1, 1)
    lease.release()
    lease.release()  # twice is once
    assert pool.num_in_flight == 0


async def test_an_id_that_moves_to_another_address_is_a_new_backend() -> None:
    pool = pool_of("a", "b")
    held = [await take(pool) for _ in range(4)]
    pool.update([BackendEntry("a", "http://elsewhere:1", "ready"), *ready("b")])
    assert {(await take(pool)).backend.url for _ in range(2)} == {"http://elsewhere:1"}
    assert len(held) == 4


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
    backend.is_resting = False  # its rest is over, but nobody has been woken yet
    newcomer = asyncio.create_task(take(pool))
    await wait_for(pool, 2)
    (await first).mark_reached()
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


async def test_an_unreachable_backend_is_probed_by_one_request_at_a_time() -> None:
    pool = pool_of("a")
    with await take(pool) as lease:
        lease.mark_unreachable()
    tasks = [asyncio.create_task(take(pool)) for _ in range(3)]
    probe = await tasks[0]
    assert pool.num_waiting == 2
    probe.mark_unreachable()
    probe.release()
    second_probe = await tasks[1]
    assert pool.num_waiting == 1
    second_probe.mark_reached()
    await tasks[2]
    assert (await take(pool)).backend.id == "a"


async def test_a_probe_that_is_given_up_lets_the_next_one_probe() -> None:
    pool = pool_of("a")
    with await take(pool) as lease:
        lease.mark_unreachable()
    probe = await take(pool)
    waiting = asyncio.create_task(take(pool))
    await wait_for(pool, 1)
    probe.release()
    assert (await waiting).backend.id == "a"


async def test_many_failures_at_once_count_as_one() -> None:
    pool = pool_of("a")
    leases = [await take(pool) for _ in range(50)]
    for lease in leases:
        lease.mark_unreachable()
        lease.release()
    started_at = asyncio.get_running_loop().time()
    await take(pool)
    assert asyncio.get_running_loop().time() - started_at < 1.0  # not 0.1 s doubled 49 times


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


async def test_real_load_is_spread_by_what_is_in_flight_not_by_turns(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    slow, fast = await start_replica("slow"), await start_replica("fast")
    slow.streams_by_hand()
    gateway = await start_gateway(slow, fast)
    stuck = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await slow.next_stream()
    for _ in range(5):
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            assert await response.json() == {"replica": "fast"}
    await stream.head()
    await stream.end()
    (await stuck).close()

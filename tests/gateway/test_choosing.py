"""Which replica takes a request."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.gateway.pools import pool_of, ready, take, wait_for

from headway_gateway.backend import Backend, BackendEntry
from headway_gateway.load import Pace
from headway_gateway.pool import BackendPool
from headway_gateway.rests import Rests

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

    from headway_gateway.lease import Lease

pytestmark = pytest.mark.timeout(60)


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
    return await take(pool, is_streamed=True)


async def test_a_new_backend_is_not_given_prompts_faster_than_it_answers_them() -> None:
    pool = pool_of("old")
    for _ in range(72):
        (await stream(pool)).mark_answered(is_measured=True)
    pool.update(ready("old", "new"))
    first = [await stream(pool) for _ in range(10)]
    # Eight prompts stand for as many requests as the old one answers.
    assert [lease.backend.id for lease in first] == [*["new"] * 8, "old", "new"]
    for lease in first:
        lease.mark_answered(is_measured=True)
    assert {(await stream(pool)).backend.id for _ in range(6)} == {"new"}


async def test_one_that_has_a_prompt_to_compute_comes_after_one_that_answers_a_few_more() -> None:
    pool = pool_of("a", "b")
    leases = [await stream(pool) for _ in range(8)]
    for lease in leases:
        lease.mark_answered(is_measured=True)
        lease.mark_answered(is_measured=True)  # twice is once
    next(lease for lease in leases if lease.backend.id == "a").release()
    assert (await stream(pool)).backend.id == "a"
    # Now both have four, of which "a" has yet to begin with one.
    assert [(await stream(pool)).backend.id for _ in range(2)] == ["b", "a"]
    assert [backend.num_unanswered for backend in pool.backends] == [2, 1]


async def test_prompts_are_waited_for_rather_than_places() -> None:
    pool = pool_of("a", "b", "c")
    leases = [await stream(pool) for _ in range(12)]
    for lease in leases:
        lease.mark_max_num_seqs(4)
        lease.mark_answered(is_measured=True)
    for lease in [one for one in leases if one.backend.id == "b"][:3]:
        lease.release()
    pool.pace = Pace(prompt_seconds=1.0, answer_seconds=20.0)
    # Three end at once, where as many come: "a" and "c" have no place for them.
    assert [(await stream(pool)).backend.id for _ in range(3)] == ["b", "b", "b"]
    # Now all are full, and "b" has three prompts to compute besides.
    assert Counter([(await stream(pool)).backend.id for _ in range(6)]) == {"a": 3, "c": 3}


async def test_a_new_backend_beside_full_ones_is_not_given_all_that_comes() -> None:
    pool = pool_of("a", "b")
    for _ in range(16):
        lease = await stream(pool)
        lease.mark_max_num_seqs(8)
        lease.mark_answered(is_measured=True)
    pool.update(ready("a", "b", "new"))
    pool.pace = Pace(prompt_seconds=1.0, answer_seconds=24.0)
    # Four prompts are waited for about as long as a place. The new one is taken to have as many as others.
    assert [(await stream(pool)).backend.id for _ in range(6)] == [*["new"] * 4, "a", "b"]
    assert Counter([(await stream(pool)).backend.id for _ in range(30)]) == {"new": 8, "a": 11, "b": 11}


async def test_those_whom_new_ones_overtake_take_no_place() -> None:
    pool = pool_of("a", "b")
    leases = [await take(pool) for _ in range(8)]
    for lease in leases:
        lease.mark_max_num_seqs(4)
    next(one for one in leases if one.backend.id == "a").mark_late_share(0.75)
    assert Counter([(await take(pool)).backend.id for _ in range(5)]) == {"a": 4, "b": 1}


async def test_what_prompts_and_answers_take_is_measured_where_nothing_else_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    pool = pool_of("a")
    unknown, first, second, third, refused = [await stream(pool) for _ in range(5)]
    now = 103.0
    unknown.mark_answered(is_measured=True)
    assert pool.pace == Pace()  # nobody knows yet how many places there are
    unknown.mark_max_num_seqs(3)
    second.mark_answered(is_measured=True)
    assert pool.pace == Pace(prompt_seconds=1.0)  # it was the third of three prompts
    third.mark_answered(is_measured=True)
    assert pool.pace == Pace(1.0)  # it had no place, but was the fourth
    refused.mark_answered(is_measured=False)
    second.mark_late_share(0.8)
    first.mark_answered(is_measured=True)
    assert pool.pace == Pace(1.0)  # it may have let others pass
    now = 113.0
    second.mark_ended()
    assert pool.pace == Pace(1.0, 10.0)
    refused.mark_ended()
    for lease in (unknown, first, second, third, refused):
        lease.release()
    assert pool.pace == Pace(1.0, 10.0)


async def test_a_request_that_ends_without_an_answer_is_not_awaited_any_more() -> None:
    pool = pool_of("a")
    leases = [await stream(pool) for _ in range(3)]
    leases[0].mark_answered(is_measured=True)
    for lease in leases:
        lease.release()
        lease.mark_answered(is_measured=True)
    (backend,) = pool.backends
    assert (backend.num_unanswered, backend.load(pool.pace)) == (0, 0.0)


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
    assert (backend.num_late, backend.load(pool.pace)) == pytest.approx((4.0, 1.0))
    leases[5].mark_unreachable()
    assert backend.load(pool.pace) == backend.in_flight == 5


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


async def test_an_unreachable_backend_is_tried_before_anybody_is_given_to_it() -> None:
    tried: list[str] = []

    async def can_connect(url: str) -> bool:
        tried.append(url)
        return len(tried) > 2

    pool = BackendPool(100, can_connect=can_connect)
    pool.update(ready("a", "b"))
    with await take(pool) as lease:
        lease.mark_unreachable()
    assert [(await take(pool)).backend.id for _ in range(3)] == ["b", "b", "b"]
    while len(tried) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (await take(pool)).backend.id == "b"
    pool.update(ready("a"))
    held = [asyncio.create_task(take(pool)) for _ in range(3)]
    assert {(await one).backend.id for one in held} == {"a"}
    assert tried == ["http://a:1"] * 3


async def test_a_backend_that_has_left_the_list_is_tried_no_more() -> None:
    tried: list[str] = []

    async def can_connect(url: str) -> bool:
        tried.append(url)
        return False

    pool = BackendPool(100, can_connect=can_connect)
    pool.update(ready("a", "b"))
    with await take(pool) as lease:
        lease.mark_unreachable()
    pool.update([BackendEntry("a", "http://elsewhere:1", "ready")])
    await asyncio.sleep(0.3)
    assert tried == []
    assert (await take(pool)).backend.url == "http://elsewhere:1"
    with await take(pool) as lease:
        lease.mark_unreachable()
    pool.close()
    await asyncio.sleep(0.3)
    assert tried == []


async def test_a_try_that_ends_before_it_has_begun_leaves_nothing_unawaited() -> None:
    """The warning, where there is one, comes as the coroutine is collected, and fails the test."""
    tried: list[str] = []

    async def can_connect(url: str) -> bool:
        tried.append(url)
        return True

    def is_known(backend: Backend) -> bool:  # asked just before the try's task is made
        asyncio.get_running_loop().call_soon(rests.close)
        return True

    rests = Rests(is_known, can_connect, lambda: pytest.fail("nobody was tried"))
    backend = Backend("a", "http://a:1", "ready")
    rests.begin(backend)
    await asyncio.sleep(backend.rest_seconds * 2)
    gc.collect()
    assert tried == []


async def test_a_connection_that_stands_after_all_ends_the_rest() -> None:
    pool = BackendPool(100, can_connect=lambda url: pytest.fail("it is known to be back"))
    pool.update(ready("a"))
    first, second = await take(pool), await take(pool)
    first.mark_unreachable()
    waiting = asyncio.create_task(take(pool))
    await wait_for(pool, 1)
    second.mark_reached()
    assert (await waiting).backend.id == "a"
    await asyncio.sleep(0.2)


async def test_many_failures_at_once_count_as_one() -> None:
    pool = pool_of("a")
    leases = [await take(pool) for _ in range(50)]
    for lease in leases:
        lease.mark_unreachable()
        lease.release()
    started_at = asyncio.get_running_loop().time()
    await take(pool)
    assert asyncio.get_running_loop().time() - started_at < 1.0  # not 0.1 s doubled 49 times


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


async def test_a_replica_that_is_quick_with_errors_is_chosen_last(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    broken, slow = await start_replica("broken"), await start_replica("slow")
    broken.answers(500, {"error": {"message": "not finite"}})
    slow.streams_by_hand()
    gateway = await start_gateway(broken, slow)

    async def post() -> int:
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            return response.status

    assert await post() == 500
    stuck = [asyncio.create_task(post()) for _ in range(4)]
    streams = [await slow.next_stream() for _ in stuck]
    assert len(broken.requests) == 1
    for stream in streams:
        await stream.head()
        await stream.end()
    assert [await one for one in stuck] == [200] * 4
    # Alone it is asked all the same.
    gateway.application.pool.update([broken.entry()])
    assert await post() == 500
    (backend,) = gateway.application.pool.backends
    assert backend.num_failures == 2
    broken.answers()
    assert await post() == 200
    assert backend.num_failures == 0

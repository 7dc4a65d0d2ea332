"""What the operator tells a gateway: shares of revisions, who may wait, and whether anybody is served."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import jwt
import pytest

from headway_gateway.backend import BackendEntry
from headway_gateway.errors import AnswerError, RoutingError
from headway_gateway.lease import Lease
from headway_gateway.pool import BackendPool
from headway_gateway.routing import Routing, parse_routing

if TYPE_CHECKING:
    from tests.gateway.conftest import Gateway, OperatorKey, StartCommand, StartGateway, StartReplica, Table

pytestmark = pytest.mark.timeout(120)
AUDIENCE = "default/demo"
TOLD: dict[str, Any] = {
    "revisions": ["demo-old", "demo-new"],
    "weights": {"demo-old": 90, "demo-new": 10},
    "max_waiting": 5,
    "waiting_timeout_seconds": 20.0,
    "suspended": False,
}


def told(**changes: Any) -> Routing:
    return parse_routing(json.dumps(TOLD | changes).encode())


def pool_of(*names: str) -> BackendPool:
    pool = BackendPool(100)
    pool.update([BackendEntry(name, f"http://{name}:1", "ready") for name in names])
    return pool


async def take(pool: BackendPool) -> Lease:
    lease = await pool.acquire(refused_by=(), since=asyncio.get_running_loop().time())
    assert lease is not None
    return lease


async def shares(pool: BackendPool, count: int) -> Counter[str]:
    """Who takes so many requests, each over before the next comes."""
    taken: Counter[str] = Counter()
    for _ in range(count):
        lease = await take(pool)
        taken[lease.backend.revision] += 1
        lease.release()
    return taken


async def test_each_revision_takes_its_share_whatever_the_number_of_its_replicas() -> None:
    pool = pool_of("demo-old-1", "demo-old-2", "demo-old-3", "demo-new-1")
    pool.route(told())
    assert await shares(pool, 100) == {"demo-old": 90, "demo-new": 10}
    pool.route(told(weights={"demo-old": 50, "demo-new": 50}))
    assert await shares(pool, 100) == {"demo-old": 50, "demo-new": 50}
    pool.route(told(weights={}))
    assert await shares(pool, 100) == {"demo-old": 75, "demo-new": 25}, "by load alone"


async def test_shares_are_spread_evenly() -> None:
    pool = pool_of("demo-old-1", "demo-new-1")
    pool.route(told(weights={"demo-old": 80, "demo-new": 20}))
    order = [(await take(pool)).backend.revision for _ in range(20)]
    places = [number for number, revision in enumerate(order) if revision == "demo-new"]
    assert [later - earlier for earlier, later in itertools.pairwise(places)] == [5, 5, 5]


async def test_within_a_revision_the_least_loaded_takes_the_next() -> None:
    pool = pool_of("demo-old-1", "demo-old-2", "demo-new-1")
    pool.route(told())
    leases = [await take(pool) for _ in range(20)]
    assert Counter(lease.backend.id for lease in leases) == {
        "demo-old-1": 9,
        "demo-old-2": 9,
        "demo-new-1": 2,
    }


async def test_who_has_no_share_is_asked_only_where_nobody_else_can_be() -> None:
    pool = pool_of("demo-old-1", "demo-new-1", "demo-older-1")
    pool.route(told(weights={"demo-old": 100, "demo-new": 0}))
    assert await shares(pool, 50) == {"demo-old": 50}
    pool.update([BackendEntry("demo-new-1", "http://new:1", "ready")])
    assert await shares(pool, 3) == {"demo-new": 3}


def test_a_backend_belongs_to_the_revision_that_its_name_begins_with() -> None:
    routing = told(revisions=["demo", "demo-old", "demo-new"], weights={})
    assert routing.revision_of("demo-old-6f7d8-x2x1z") == "demo-old"
    assert routing.revision_of("demo-older-1") == "demo"
    assert routing.revision_of("other-1") == ""


async def test_a_longer_time_to_wait_holds_for_those_who_wait_already() -> None:
    pool = BackendPool(10)
    pool.route(told(weights={}, waiting_timeout_seconds=0.2))
    began_at = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(take(pool))
    while not pool.num_waiting:  # noqa: ASYNC110 - the pool has no event for it
        await asyncio.sleep(0)
    pool.route(told(weights={}, waiting_timeout_seconds=20.0))
    done, _ = await asyncio.wait((waiting,), timeout=0.4)
    assert not done
    assert asyncio.get_running_loop().time() - began_at >= 0.4
    pool.update([BackendEntry("demo-old-1", "http://old:1", "ready")])
    assert (await waiting).backend.id == "demo-old-1"


async def test_the_number_that_may_wait_is_the_one_told_last() -> None:
    pool = BackendPool(100)
    pool.route(told(weights={}, max_waiting=1))
    waiting = asyncio.create_task(take(pool))
    while not pool.num_waiting:  # noqa: ASYNC110 - the pool has no event for it
        await asyncio.sleep(0)
    with pytest.raises(AnswerError) as caught:
        await take(pool)
    assert (caught.value.status, caught.value.reason) == (503, "waiting_queue_full")
    assert caught.value.retry_after_seconds is not None
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pool.num_waiting == 0


async def test_a_suspended_service_refuses_who_comes_and_who_waits() -> None:
    pool = BackendPool(10)
    waiting = asyncio.create_task(take(pool))
    while not pool.num_waiting:  # noqa: ASYNC110 - the pool has no event for it
        await asyncio.sleep(0)
    pool.route(told(weights={}, suspended=True))
    for refused in (waiting, asyncio.create_task(take(pool))):
        with pytest.raises(AnswerError) as caught:
            await refused
        assert (caught.value.status, caught.value.reason) == (503, "suspended")
        assert caught.value.retry_after_seconds == 60
    pool.update([BackendEntry("demo-old-1", "http://old:1", "ready")])
    pool.route(told(weights={}))
    assert (await take(pool)).backend.id == "demo-old-1"


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"weights": {"demo-none": 5}}, "'demo-none', which is not among revisions"),
        ({"weights": {"demo-old": 101}}, r"weights\['demo-old'\]=101"),
        ({"weights": {"demo-old": True}}, "weights"),
        ({"weights": {"demo-old": 0}}, "all 0"),
        ({"weights": 5}, "not an object"),
        ({"revisions": "demo"}, "not a list of names"),
        ({"revisions": [f"r{number}" for number in range(17)], "weights": {}}, "16 at most"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"waiting_timeout_seconds": -1}, "waiting_timeout_seconds=-1"),
        ({"waiting_timeout_seconds": "30"}, "waiting_timeout_seconds='30'"),
        ({"suspended": "no"}, "suspended='no'"),
        ({"colour": "red"}, "colour is not a field"),
    ],
)
def test_a_routing_that_cannot_be_followed_names_its_field(changes: dict[str, Any], want: str) -> None:
    with pytest.raises(RoutingError, match=want):
        told(**changes)


@pytest.mark.parametrize(
    ("content", "want"), [(b"{", "not JSON"), (b"[]", "not an object"), (b"{}", "lacks")]
)
def test_a_routing_is_told_whole(content: bytes, want: str) -> None:
    with pytest.raises(RoutingError, match=want):
        parse_routing(content)


class Operator:
    """Calls the admin paths of one gateway with tokens of its own."""

    def __init__(self, key: OperatorKey, client: aiohttp.ClientSession, url: str) -> None:
        self._key, self._client, self._url = key, client, url

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        now = int(time.time())
        claims = {"iss": "headway-operator", "aud": AUDIENCE, "iat": now, "exp": now + 60}
        token = jwt.encode(claims, self._key.private, algorithm="EdDSA")
        headers = {"Authorization": f"Bearer {token}"}
        async with self._client.request(method, self._url + path, headers=headers, json=body) as response:
            return response.status, await response.json()


@pytest.fixture
def key(make_key: Callable[[], OperatorKey]) -> OperatorKey:
    return make_key()


@pytest.fixture
def key_file(tmp_path: Path, key: OperatorKey) -> Path:
    path = tmp_path / "public.pem"
    path.write_bytes(key.public_pem)
    return path


@pytest.fixture
async def guarded(
    start_gateway: StartGateway, key_file: Path, key: OperatorKey, client: Any
) -> tuple[Gateway, Operator]:
    """A gateway with an operator."""
    gateway = await start_gateway(admin_public_key_file=key_file, admin_audience=AUDIENCE)
    return gateway, Operator(key, client, gateway.url)


async def test_what_is_told_stands_in_the_sample(guarded: tuple[Gateway, Operator]) -> None:
    _, operator = guarded
    status, before = await operator.call("GET", "/admin/sample")
    assert (status, before["routing"]["weights"], before["routing"]["max_waiting"]) == (200, {}, 1024)
    assert await operator.call("PUT", "/admin/routing", TOLD) == (200, TOLD)
    _, after = await operator.call("GET", "/admin/sample")
    assert after["routing"] == TOLD
    status, body = await operator.call("PUT", "/admin/routing", TOLD | {"max_waiting": -1})
    assert (status, body["error"]["code"]) == (422, "invalid_routing")
    _, kept = await operator.call("GET", "/admin/sample")
    assert kept["routing"] == TOLD
    assert (await operator.call("GET", "/admin/routing"))[0] == 405
    assert (await operator.call("PUT", "/admin/sample", {}))[0] == 405


async def test_nobody_but_the_operator_routes_or_asks_for_demand(
    guarded: tuple[Gateway, Operator], client: aiohttp.ClientSession
) -> None:
    gateway, _ = guarded
    async with client.put(f"{gateway.url}/admin/routing", json=TOLD | {"suspended": True}) as response:
        assert response.status == 401
    async with client.get(f"{gateway.url}/admin/demand") as response:
        assert response.status == 401
    assert not gateway.application.pool.routing.is_suspended


async def test_requests_and_errors_are_counted_by_revision(
    guarded: tuple[Gateway, Operator], client: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    gateway, operator = guarded
    good, bad = await start_replica("demo-old-1"), await start_replica("demo-new-1")
    bad.answers(500, {"error": {}})
    gateway.application.pool.update([good.entry(), bad.entry()])
    await operator.call("PUT", "/admin/routing", TOLD | {"weights": {"demo-old": 50, "demo-new": 50}})
    for _ in range(10):
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            await response.read()
    # The first that it dies of is an error of its own, and is answered by the other, as are those after it.
    bad.dies_before_the_head()
    for _ in range(4):
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            await response.read()
    _, sample = await operator.call("GET", "/admin/sample")
    assert sample["revisions"] == {
        "demo-old": {"requests": 9, "errors": 0, "client_aborted": 0},
        "demo-new": {"requests": 6, "errors": 6, "client_aborted": 0},
    }
    async with client.get(f"{gateway.url}/metrics") as response:
        page = await response.text()
    for line in (
        'headway_gateway_revision_requests_total{revision="demo-old"} 9.0',
        'headway_gateway_revision_errors_total{revision="demo-new"} 6.0',
        'headway_gateway_revision_weight{revision="demo-new"} 50.0',
        'headway_gateway_revision_response_head_seconds_count{revision="demo-old"} 9.0',
    ):
        assert line in page
    await operator.call("PUT", "/admin/routing", TOLD | {"revisions": ["demo-old"], "weights": {}})
    async with client.get(f"{gateway.url}/metrics") as response:
        page = await response.text()
    assert 'revision="demo-new"' not in page
    assert 'headway_gateway_revision_requests_total{revision="demo-old"} 9.0' in page


async def test_an_answer_that_breaks_off_is_an_error_of_its_revision(
    guarded: tuple[Gateway, Operator], client: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    gateway, operator = guarded
    replica = await start_replica("demo-new-1")
    replica.streams_by_hand()
    gateway.application.pool.update([replica.entry()])
    await operator.call("PUT", "/admin/routing", TOLD)
    pending = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("data: 1\n\n")
    async with await pending as response:
        stream.die()
        assert b"replica_died" in await response.read()
    _, sample = await operator.call("GET", "/admin/sample")
    assert sample["revisions"] == {"demo-new": {"requests": 1, "errors": 1, "client_aborted": 0}}


async def test_demand_is_told_at_the_moment_somebody_waits(
    guarded: tuple[Gateway, Operator], client: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    gateway, operator = guarded
    assert await operator.call("GET", "/admin/demand?timeout_seconds=0.05") == (200, {"waiting": 0})
    question = asyncio.create_task(operator.call("GET", "/admin/demand?timeout_seconds=30"))
    done, _ = await asyncio.wait((question,), timeout=0.2)
    assert not done
    waiting = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    asked_at = time.monotonic()
    assert await question == (200, {"waiting": 1})
    assert time.monotonic() - asked_at < 1.0, "no interval lies between"
    assert await operator.call("GET", "/admin/demand") == (200, {"waiting": 1})
    replica = await start_replica("demo-old-1")
    gateway.application.pool.update([replica.entry()])
    async with await waiting as response:
        assert response.status == 200
    assert await operator.call("GET", "/admin/demand?timeout_seconds=0.05") == (200, {"waiting": 0})
    assert (await operator.call("GET", "/admin/demand?timeout_seconds=31"))[0] == 422
    assert (await operator.call("GET", "/admin/demand?timeout_seconds=x"))[0] == 422


async def test_a_gateway_process_holds_a_stream_until_a_replica_comes_and_refuses_the_one_too_many(
    start_command: StartCommand,
    start_replica: StartReplica,
    client: aiohttp.ClientSession,
    table: Table,
    key_file: Path,
    key: OperatorKey,
) -> None:
    table.write()
    command = await start_command(
        *("--backends-file", str(table.path), "--admin-audience", AUDIENCE),
        *("--admin-public-key-file", str(key_file)),
    )
    operator = Operator(key, client, command.url)
    async with asyncio.timeout(20):
        while True:
            async with client.get(f"{command.url}/ready") as response:
                if response.status == 200:
                    break
    assert (await operator.call("PUT", "/admin/routing", TOLD | {"max_waiting": 1, "weights": {}}))[0] == 200
    url = f"{command.url}/v1/chat/completions"
    held = asyncio.create_task(client.post(url, json={"stream": True}))
    assert await operator.call("GET", "/admin/demand?timeout_seconds=20") == (200, {"waiting": 1})
    async with client.post(url, json={"stream": True}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "waiting_queue_full"
    replica = await start_replica("demo-old-1")
    replica.streams_by_hand()
    table.write(replica.entry())
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("data: 1\n\n")
    async with await held as response:
        assert response.status == 200
        assert await response.content.readany() == b"data: 1\n\n"
        await stream.end()
        assert await response.content.read() == b""

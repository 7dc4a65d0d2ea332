"""What needs no replica is answered without one, and wakes none; all else waits, which is what wakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from headway_gateway.last_answers import MOST_ANSWERS

if TYPE_CHECKING:
    from tests.gateway.conftest import Gateway, Replica, StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)
MODELS = {
    "object": "list",
    "data": [{"id": "demo", "parent": None}, {"id": "org/adapter", "parent": "demo"}],
}
KEY = {"Authorization": "Bearer one"}
OTHER_KEY = {"Authorization": "Bearer another"}


async def asked(
    gateway: Gateway, client: aiohttp.ClientSession, path: str, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    async with client.get(gateway.url + path, headers=headers) as response:
        return response.status, await response.json()


async def is_held(
    gateway: Gateway, client: aiohttp.ClientSession, path: str, headers: dict[str, str] | None = None
) -> bool:
    """Whether it waits for a replica; if so, it gives up."""
    request = asyncio.create_task(client.get(gateway.url + path, headers=headers))
    await gateway.until(lambda: request.done() or gateway.application.pool.num_waiting > 0)
    held = not request.done()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await gateway.until(lambda: gateway.application.pool.num_waiting == 0)
    return held


def sleep(gateway: Gateway) -> None:
    gateway.application.pool.update([])


@pytest.fixture
async def replica(start_replica: StartReplica) -> Replica:
    replica = await start_replica("a")
    replica.answers(200, MODELS)
    return replica


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("HEAD", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("HEAD", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/demo", 405),
        ("DELETE", "/v1/responses/resp_1", 404),
    ],
)
async def test_what_no_replica_would_serve_wakes_none(
    method: str,
    path: str,
    status: int,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    replica: Replica,
) -> None:
    gateway = await start_gateway()
    demand = asyncio.create_task(gateway.application.pool.demand())
    headers = {"X-Request-Id": "mine", "Origin": "https://page.example"}
    async with client.request(method, gateway.url + path, headers=headers) as response:
        assert response.status == status
        assert response.headers["X-Request-Id"] == "mine"
        assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert not demand.done()
    demand.cancel()
    assert gateway.counters["received"] == 0
    # A replica that is there has the word.
    gateway.application.pool.update([replica.entry()])
    async with client.request(method, gateway.url + path) as response:
        assert response.status == 200


async def test_a_browser_may_ask_what_pages_may_send_without_waking_anybody(
    start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway()
    headers = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with client.options(f"{gateway.url}/v1/chat/completions", headers=headers) as response:
        assert (response.status, await response.read()) == (200, b"OK")
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert gateway.application.pool.num_waiting == 0


async def test_what_needs_a_replica_waits_for_one(
    start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway()
    for path in ("/v1/models", "/v1/models/demo", "/openapi.json"):
        assert await is_held(gateway, client, path), "nobody has said it yet"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        request = asyncio.create_task(client.post(gateway.url + path, json={}))
        await gateway.until(lambda: gateway.application.pool.num_waiting == 1)
        request.cancel()
        await gateway.until(lambda: gateway.application.pool.num_waiting == 0)


async def test_what_is_served_is_told_as_a_replica_told_it_last(
    start_gateway: StartGateway, client: aiohttp.ClientSession, replica: Replica
) -> None:
    gateway = await start_gateway(replica)
    assert await asked(gateway, client, "/v1/models", KEY) == (200, MODELS)
    sleep(gateway)
    assert await asked(gateway, client, "/v1/models", KEY) == (200, MODELS)
    async with client.head(f"{gateway.url}/v1/models", headers=KEY) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
        assert int(response.headers["Content-Length"]) > 0
    assert await asked(gateway, client, "/v1/models/org/adapter", KEY) == (200, MODELS["data"][1])
    status, answer = await asked(gateway, client, "/v1/models/none", KEY)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "use 'demo' or 'org/adapter'" in answer["error"]["message"]
    assert len(replica.requests) == 1
    assert await is_held(gateway, client, "/v1/models", OTHER_KEY), "it may be nobody's key"
    assert await is_held(gateway, client, "/v1/models")


async def test_what_a_replica_told_somebody_without_a_key_everybody_may_know(
    start_gateway: StartGateway, client: aiohttp.ClientSession, replica: Replica
) -> None:
    gateway = await start_gateway(replica)
    await asked(gateway, client, "/v1/models")
    replica.answers(200, {"openapi": "3.1.0", "x": "y" * 100_000})
    document = await asked(gateway, client, "/openapi.json")
    sleep(gateway)
    assert await asked(gateway, client, "/v1/models", KEY) == (200, MODELS)
    assert await asked(gateway, client, "/openapi.json", OTHER_KEY) == document


async def test_who_may_not_know_is_told_so_again_and_nobody_else(
    start_gateway: StartGateway, client: aiohttp.ClientSession, replica: Replica
) -> None:
    gateway = await start_gateway(replica)
    replica.answers(401, {"error": {"code": "invalid_api_key"}}, {"WWW-Authenticate": "Bearer"})
    refused = await asked(gateway, client, "/v1/models")
    replica.answers(503, {"error": {}})
    await asked(gateway, client, "/v1/models", OTHER_KEY)
    sleep(gateway)
    assert await asked(gateway, client, "/v1/models") == refused
    assert await asked(gateway, client, "/v1/models/demo") == refused
    async with client.get(f"{gateway.url}/v1/models") as response:
        assert response.headers["WWW-Authenticate"] == "Bearer"
    for headers in (KEY, OTHER_KEY):
        assert await is_held(gateway, client, "/v1/models", headers)


async def test_other_revisions_may_serve_another_model(
    start_gateway: StartGateway, client: aiohttp.ClientSession, replica: Replica
) -> None:
    gateway = await start_gateway(replica)
    pool = gateway.application.pool
    routing = replace(pool.routing, revisions=("a",))
    gateway.application._note_routing(routing)
    await asked(gateway, client, "/v1/models")
    sleep(gateway)
    gateway.application._note_routing(replace(routing, max_waiting=7))
    assert await asked(gateway, client, "/v1/models") == (200, MODELS)
    gateway.application._note_routing(replace(routing, revisions=("a", "b")))
    assert await is_held(gateway, client, "/v1/models")


async def test_a_suspended_service_says_so_of_everything(
    start_gateway: StartGateway, client: aiohttp.ClientSession, replica: Replica
) -> None:
    gateway = await start_gateway(replica)
    await asked(gateway, client, "/v1/models")
    sleep(gateway)
    gateway.application.pool.route(replace(gateway.application.pool.routing, is_suspended=True))
    for path in ("/v1/models", "/v1/nothing"):
        status, answer = await asked(gateway, client, path)
        assert (status, answer["error"]["code"]) == (503, "suspended")


async def test_only_so_many_answers_are_kept(
    start_gateway: StartGateway, client: aiohttp.ClientSession, replica: Replica
) -> None:
    gateway = await start_gateway(replica)
    for number in range(MOST_ANSWERS + 1):
        await asked(gateway, client, "/v1/models", {"Authorization": f"Bearer {number}"})
    sleep(gateway)
    assert await asked(gateway, client, "/v1/models", {"Authorization": "Bearer 1"}) == (200, MODELS)
    assert await is_held(gateway, client, "/v1/models", {"Authorization": "Bearer 0"})

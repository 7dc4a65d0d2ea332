"""Pages of other origins can read the gateway's own errors, as they can a replica's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import aiohttp
    from tests.gateway.conftest import StartGateway, StartReplica

ORIGIN = {"Origin": "https://page.example"}


@pytest.mark.parametrize(
    ("want", "fields", "request_options"),
    [
        (503, {"waiting_timeout_seconds": 0.0}, {"data": b"{}"}),
        (413, {"max_body_bytes": 10}, {"data": bytes(100)}),
        (502, {}, {"data": b"{}"}),
        (431, {}, {"headers": {f"X-{number}": "a" * 7000 for number in range(10)}}),
    ],
    ids=["no-replica-in-time", "too-large", "two-replicas-died", "head-too-large"],
)
async def test_an_error_of_the_gateway_says_that_pages_may_read_it(
    want: int,
    fields: dict[str, Any],
    request_options: dict[str, Any],
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
) -> None:
    replicas = [await start_replica(name) for name in "ab"] if want != 503 else []
    for replica in replicas:
        replica.dies_before_the_head()
    gateway = await start_gateway(*replicas, **fields)
    own = request_options.get("headers", {})
    for origin, allowed in ((ORIGIN, "*"), ({}, None)):
        async with client.post(
            f"{gateway.url}/v1/completions", data=request_options.get("data"), headers={**own, **origin}
        ) as response:
            assert response.status == want
            assert response.headers["Vary"] == "Origin"
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
            shown = response.headers.get("Access-Control-Expose-Headers")
            assert shown == ("X-Request-Id, Retry-After" if origin else None)

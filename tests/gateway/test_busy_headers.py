"""What replicas say with their answers of how busy they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import aiohttp
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("said", "want"),
    [
        pytest.param("0.750", 0.75, id="most"),
        pytest.param("0.500", 0.0, id="not most"),
        pytest.param("1.5", 0.3125, id="no share"),
        pytest.param("nan", 0.3125, id="no number"),
        pytest.param("many", 0.3125, id="a word"),
        pytest.param(None, 0.3125, id="a replica that does not say"),
    ],
)
async def test_what_a_replica_says_of_late_requests_is_kept_and_not_passed_on(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    said: str | None,
    want: float,
) -> None:
    """Beside one that is in flight all the time; what was said of two is half as much once one has ended."""
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    held = await gateway.application.pool.acquire(refused_by=(), since=asyncio.get_running_loop().time())
    assert held is not None
    for share in ("0.625", said):
        replica.answers(headers={} if share is None else {"X-Headway-Late-Share": share})
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            assert response.status == 200
            assert "X-Headway-Late-Share" not in response.headers
    (backend,) = gateway.application.pool.backends
    assert backend.num_late == want
    held.release()
    assert backend.num_late == 0.0


@pytest.mark.parametrize(
    ("said", "want"),
    [
        pytest.param("3", 3, id="fewer"),
        pytest.param("0", 8, id="none at all"),
        pytest.param("-1", 8, id="fewer than none"),
        pytest.param("2.5", 8, id="no whole number"),
        pytest.param("many", 8, id="a word"),
        pytest.param(None, 8, id="a replica that does not say"),
    ],
)
async def test_how_many_a_replica_computes_at_once_is_kept_and_not_passed_on(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    said: str | None,
    want: int,
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway(replica)
    (backend,) = gateway.application.pool.backends
    assert backend.max_num_seqs is None
    for number in ("8", said):
        replica.answers(headers={} if number is None else {"X-Headway-Max-Num-Seqs": number})
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            assert response.status == 200
            assert "X-Headway-Max-Num-Seqs" not in response.headers
    assert backend.max_num_seqs == want

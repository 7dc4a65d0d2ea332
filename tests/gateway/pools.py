"""Pools of backends that nobody connects to, and those who ask them for one."""

import asyncio

from headway_gateway.backend import BackendEntry
from headway_gateway.lease import Lease
from headway_gateway.pool import BackendPool


def ready(*names: str) -> list[BackendEntry]:
    return [BackendEntry(name, f"http://{name}:1", "ready") for name in names]


def pool_of(*names: str, max_waiting: int = 100) -> BackendPool:
    pool = BackendPool(max_waiting)
    pool.update(ready(*names))
    return pool


async def take(pool: BackendPool, *, within_seconds: float = 30.0, is_streamed: bool = False) -> Lease:
    until = asyncio.get_running_loop().time() + within_seconds
    since = until - pool.routing.waiting_timeout_seconds
    lease = await pool.acquire(refused_by=(), since=since, is_streamed=is_streamed)
    assert lease is not None
    return lease


async def wait_for(pool: BackendPool, num_waiting: int) -> None:
    while pool.num_waiting != num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)

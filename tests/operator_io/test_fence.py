"""A write that waits for its turn is not sent once the operator leads no more; over real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError, NotLeadingError

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one", "namespace": "ns"}}


class Server:
    """Answers reads when told to and writes at once; notes both."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_reading = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.method)
        if request.method == "GET":
            self.is_reading.set()
            await self.may_answer.wait()
        return web.json_response({"kind": "ConfigMap"})


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[KubernetesApi]:
    """With a single connection, so that a call waits for the one before it."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration(
        host=f"http://127.0.0.1:{runner.addresses[0][1]}", connection_pool_maxsize=1
    )
    async with KubernetesApi(configuration) as api:
        yield api
    await runner.cleanup()


async def apply(api: KubernetesApi) -> Any:
    return await api.apply(CONFIG_MAP, force=True)


async def delete(api: KubernetesApi) -> Any:
    return await api.delete("ConfigMap", "ns", "one")


@pytest.mark.parametrize("write", [apply, delete])
@pytest.mark.parametrize("still_leads", [True, False])
async def test_a_write_that_waits_for_a_connection_asks_again_before_it_is_sent(
    api: KubernetesApi, server: Server, write: Any, *, still_leads: bool
) -> None:
    leads = True
    guarded = api.guarded(lambda: leads)
    reading = asyncio.create_task(api.get("ConfigMap", "ns", "one"))
    await server.is_reading.wait()
    writing = asyncio.create_task(write(guarded))
    await asyncio.sleep(0.05)  # it has begun, and waits
    leads = still_leads
    server.may_answer.set()
    await reading
    if still_leads:
        await writing
    else:
        with pytest.raises(NotLeadingError, match=r"/configmaps/one: this operator does not hold the Lease"):
            await writing
    await api.get("ConfigMap", "ns", "one")  # reads, and the connection, are as before
    assert [method for method in server.asked if method != "GET"] == (
        [] if not still_leads else ["PATCH" if write is apply else "DELETE"]
    )


async def test_leadership_that_ends_between_head_and_body_ends_the_write(
    api: KubernetesApi, server: Server
) -> None:
    answers = iter((True, True, False))  # at the call, the head, the body
    with pytest.raises(ClusterError):
        await apply(api.guarded(lambda: next(answers)))
    assert next(answers, None) is None
    assert server.asked == []

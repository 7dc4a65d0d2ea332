"""Children that nobody touched are not written: not by the next pass, and not by an operator that starts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from e2e.conftest import eventually
from e2e.fault_proxy import FaultProxy
from headway_operator.cluster.kubernetes import CACHED_KINDS, KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_applied import REAPPLY_SECONDS
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.keys import AdminKeys
from headway_operator.passes import Carried, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

TakePass = Callable[[], Awaitable[set[str]]]
Operator = Callable[[], contextlib.AbstractAsyncContextManager[TakePass]]


@pytest.fixture
def operator(key: ServiceKey, proxy: FaultProxy) -> Operator:
    """A fresh operator whose passes are taken one by one: each a minute after the one before it.

    A pass answers with the kinds of the children that it wrote.
    """
    keys, now = AdminKeys.generate(), [1_800_000_000.0]

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[TakePass]:
        async with await KubernetesApi.connect(proxy.kubeconfig) as watched:
            cache = KubernetesCache(watched, "", CACHED_KINDS)
            cluster = KubernetesCluster(
                watched,
                runtime_image="runtime:1",
                gateway_image="gateway:1",
                clock=lambda: now[0],
                cache=cache,
            )
            task = asyncio.create_task(cache.run())
            await cache.tried(30.0)
            carried = Carried()
            async with Scraper(keys, time.time) as scraper:
                world = World(cluster, scraper, keys, lambda: now[0])

                async def take_pass() -> set[str]:
                    now[0] += REAPPLY_SECONDS + 1
                    manifest, before = await cluster.fetch(key), len(proxy.writes())
                    assert manifest is not None
                    outcome = await reconcile(world, manifest, carried)
                    assert outcome.problems == []
                    paths = [one.path.split("?")[0].split("/")[-2:] for one in proxy.writes()[before:]]
                    return {kind for kind, name in paths if "memory" not in name and name != "status"}

                yield take_pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return running


def is_quiet(take_pass: TakePass) -> Callable[[], Awaitable[bool]]:
    """Whether a pass writes no child."""

    async def ask() -> bool:
        return not await take_pass()

    return ask


async def test_a_pass_writes_what_somebody_touched_and_nothing_else(
    api: KubernetesApi, key: ServiceKey, operator: Operator
) -> None:
    async with operator() as take_pass:
        await take_pass()
        await eventually(is_quiet(take_pass))
        await api.patch("Service", key.namespace, "demo", {"spec": {"selector": {"app": "else"}}})
        await api.patch("Deployment", key.namespace, "demo-gateway", {"metadata": {"labels": {"a": "b"}}})

        async def is_repaired() -> bool:
            await take_pass()
            service = await api.get("Service", key.namespace, "demo")
            assert service is not None
            return "serving.headway.dev/component" in service["spec"]["selector"]

        await eventually(is_repaired)
        await eventually(is_quiet(take_pass))


async def test_an_operator_that_starts_writes_only_what_was_touched_while_none_ran(
    api: KubernetesApi, key: ServiceKey, operator: Operator
) -> None:
    async with operator() as take_pass:
        assert {"services", "deployments", "roles"} <= await take_pass()
        await eventually(is_quiet(take_pass))

    async with operator() as take_pass:
        assert await take_pass() == set()

    await api.patch("Service", key.namespace, "demo", {"spec": {"selector": {"app": "else"}}})
    async with operator() as take_pass:
        assert await take_pass() == {"services"}
    service = await api.get("Service", key.namespace, "demo")
    assert service is not None
    assert "serving.headway.dev/component" in service["spec"]["selector"]

"""Hearing of changes on a real API server: many at once, of many namespaces, of kinds that may be missing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes.config import kube_config

from e2e.conftest import CRD_PATH, eventually
from e2e.test_api_children import is_served, monitoring_definitions
from headway_operator.cluster.kubernetes import CACHED_KINDS, KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.handlers import watch
from headway_operator.names import API_VERSION, LEADER_WORKER_SET, MONITORING_KINDS
from headway_operator.state import ServiceKey

NUM_SERVICES = 120
# Workers that stay for kopf's five seconds, twenty at a time, would need thirty.
MOST_SECONDS = 10.0
# Watches of this many namespaces are more than a client opens connections by default.
NUM_NAMESPACES = 12


# kopf says TLS' goodbye when its watch ends and does not wait for the answer, nor does the loop.
@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
async def test_a_burst_of_services_is_heard_of_at_once(
    kubeconfig: Path, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    # $KUBECONFIG is read once, when the client is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    namespace, heard = "burst", dict[ServiceKey, float]()
    await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    for number in range(NUM_SERVICES):
        metadata = {"name": f"demo-{number}", "namespace": namespace}
        spec = {"model": {"source": "bundled://headway-tiny"}, "replicas": 1}
        await api.create(
            {"apiVersion": API_VERSION, "kind": "InferenceService", "metadata": metadata, "spec": spec}
        )

    async def nothing() -> None:
        return

    def hear(key: ServiceKey) -> None:
        heard.setdefault(key, time.monotonic())

    task = asyncio.create_task(watch([namespace], hear, nothing, {}))
    try:
        await eventually(lambda: len(heard) == NUM_SERVICES, 3 * MOST_SECONDS)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert max(heard.values()) - min(heard.values()) < MOST_SECONDS


@contextlib.asynccontextmanager
async def kept(cache: KubernetesCache) -> AsyncIterator[None]:
    """Current, for a while."""
    task = asyncio.create_task(cache.run())
    await cache.tried(60.0)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_watches_of_many_namespaces_leave_calls_their_connections(
    kubeconfig: Path, api: KubernetesApi
) -> None:
    names = [f"team-{number}" for number in range(NUM_NAMESPACES)]
    for name in names:
        await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    async with await KubernetesApi.connect(kubeconfig) as own:
        assert len(names) * len(CACHED_KINDS) > own._configuration.connection_pool_maxsize
        async with kept(KubernetesCache(own, names, CACHED_KINDS)):
            for name in names:
                assert await own.list("Pod", name) == []


async def test_optional_kinds_are_read_from_memory_once_they_are_there(
    kubeconfig: Path, api: KubernetesApi, key: ServiceKey
) -> None:
    for kind in MONITORING_KINDS:
        await api._call("POST", CRD_PATH, body=monitoring_definitions()[kind])
        await eventually(lambda kind=kind: is_served(api, kind))  # type: ignore[misc]
    calls: list[str] = []
    async with await KubernetesApi.connect(kubeconfig, on_call=lambda *call: calls.append(call[0])) as own:
        cache = KubernetesCache(own, (), CACHED_KINDS)
        cluster = KubernetesCluster(own, runtime_image="", gateway_image="", cache=cache)
        async with kept(cache):
            assert cache.current_kinds() == CACHED_KINDS.keys() - {LEADER_WORKER_SET}
            await cluster.observe(key)
            assert cluster.site.optional_kinds == MONITORING_KINDS.keys()
            calls.clear()
            await cluster.observe(key)
            assert calls == []

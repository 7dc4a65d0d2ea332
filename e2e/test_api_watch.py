"""Hearing of services: what a burst of changes on a real API server costs in time."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from kubernetes.config import kube_config

from e2e.conftest import eventually
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.handlers import watch
from headway_operator.names import API_VERSION
from headway_operator.state import ServiceKey

NUM_SERVICES = 120
# Workers that stay for kopf's five seconds, twenty at a time, would need thirty.
MOST_SECONDS = 10.0


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

    task = asyncio.create_task(
        watch([namespace], lambda key: heard.setdefault(key, time.monotonic()) and None, nothing, {})
    )
    try:
        await eventually(lambda: len(heard) == NUM_SERVICES, 3 * MOST_SECONDS)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert max(heard.values()) - min(heard.values()) < MOST_SECONDS

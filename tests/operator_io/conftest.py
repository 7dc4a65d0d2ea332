"""Builders for the operator's I/O tests: stand-in processes, manifests, and waiting for a fact."""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from headway_operator.cluster.local import LocalCluster
from headway_operator.keys import AdminKeys
from headway_operator.names import ServiceKey, component_labels

KEY = ServiceKey("default", "demo")
STANDIN = Path(__file__).with_name("standin_server.py")


class DeploymentBuilder(Protocol):
    def __call__(
        self,
        name: str,
        *,
        environment: dict[str, str] | None = None,
        container: dict[str, Any] | None = None,
        pod: dict[str, Any] | None = None,
    ) -> dict[str, Any]: ...


@pytest.fixture
def key() -> ServiceKey:
    return KEY


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Await a fact: polls a function until what it returns is true, and returns that."""

    async def wait(fact: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            value = fact()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            assert time.monotonic() < deadline, f"not so within {seconds:g} s"
            await asyncio.sleep(0.02)

    return wait


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def deployment() -> DeploymentBuilder:
    """A Deployment whose process is the stand-in: `demo-gateway`, or `demo-REVISION`."""

    def build(
        name: str,
        *,
        environment: dict[str, str] | None = None,
        container: dict[str, Any] | None = None,
        pod: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        component = "gateway" if name.endswith("-gateway") else "runtime"
        labels = component_labels("demo", component)
        if component == "runtime":
            labels["serving.headway.dev/revision"] = name.rpartition("-")[2]
        runtime = {
            "name": component,
            "command": [sys.executable, str(STANDIN)],
            "args": ["gateway" if component == "gateway" else "serve", "--port", "0"],
            "env": [{"name": key, "value": value} for key, value in (environment or {}).items()],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1},
            **(container or {}),
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [runtime], **(pod or {})},
                },
            },
        }

    return build


@pytest.fixture
def admin_keys() -> AdminKeys:
    return AdminKeys.generate()


@pytest.fixture
async def local_cluster(free_port: int, admin_keys: AdminKeys, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(port=free_port, public_pem=admin_keys.public_pem, workspace_parent=tmp_path)
    async with cluster:
        yield cluster

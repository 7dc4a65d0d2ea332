"""`headway operator` as a process of this machine, for tests of the program itself."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.state import ServiceKey

INTERVAL_SECONDS = 0.5
END_SECONDS = 30.0


@dataclass
class OperatorProcess:
    """A running operator; `output` has its log once it has ended."""

    process: asyncio.subprocess.Process
    health_port: int
    metrics_port: int
    output: str = ""

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /healthz."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{self.health_port}/healthz") as response:
                return response.status, await response.json()

    async def metrics(self) -> str:
        """The page of /metrics."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{self.metrics_port}/metrics") as response:
                return await response.text()

    async def is_leading(self) -> bool:
        """Whether it answers and holds the Lease."""
        with contextlib.suppress(aiohttp.ClientError):
            return bool((await self.health())[1]["is_leading"])
        return False


@contextlib.asynccontextmanager
async def running_operator(
    kubeconfig: Path, namespace: str, *options: str, watches_all: bool = False
) -> AsyncIterator[OperatorProcess]:
    """An operator for one namespace, which also holds its Lease and keys; asked to end afterwards.

    watches_all: it looks after all namespaces.
    """
    health_port, metrics_port = free_port(), free_port()
    arguments = [
        *("--interval-seconds", str(INTERVAL_SECONDS)),
        *("--runtime-image", "runtime:1", "--gateway-image", "gateway:1"),
        *("--health-port", str(health_port), "--metrics-port", str(metrics_port)),
        *("--namespace", "" if watches_all else namespace, "--admin-secret-namespace", namespace),
    ]
    log = kubeconfig.with_name(f"operator-{health_port}.log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headway", "operator", *arguments, *options),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stderr=output,
        )
    running = OperatorProcess(process, health_port, metrics_port)
    try:
        yield running
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), END_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        running.output = log.read_text(errors="replace")


async def generation(cluster: KubernetesCluster, key: ServiceKey) -> int:
    """The generation that the status is about."""
    found = await cluster.fetch(key)
    return int(((found or {}).get("status") or {}).get("observedGeneration", 0))


async def edit(api: KubernetesApi, key: ServiceKey, replicas: int) -> Callable[[], Awaitable[bool]]:
    """Change the spec; the fact that an operator has seen it."""
    body = {"spec": {"scaling": {"minReplicas": replicas}}}
    changed = await api.patch("InferenceService", key.namespace, "demo", body)
    assert changed is not None
    cluster = KubernetesCluster(api, runtime_image="", gateway_image="")
    want = int(changed["metadata"]["generation"])

    async def is_seen() -> bool:
        return await generation(cluster, key) == want

    return is_seen


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

"""The services and pods of the benchmark, written to the API server as kubectl and a kubelet would."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.names import (
    API_VERSION,
    GATEWAY_COMPONENT,
    KIND,
    POD_TEMPLATE_HASH_LABEL,
    REVISION_LABEL,
    RUNTIME_COMPONENT,
    component_labels,
)
from headway_operator.state import ServiceKey

SERVICES_PER_NAMESPACE = 100
REPLICAS = 2
LIMITS = (8, 512)
TARGET_MILLISECONDS = 300.0
# Writes at once: more would only queue in the API server.
CONCURRENCY = 16
TEMPLATE_HASH = "6f7c9d8b5"
READY_SINCE = "2026-01-02T03:04:05Z"
Json = dict[str, Any]


def keys(count: int) -> list[ServiceKey]:
    """The services, in namespaces of a hundred each."""
    return [ServiceKey(f"bench-{n // SERVICES_PER_NAMESPACE}", f"service-{n}") for n in range(count)]


def address(number: int, pod: int) -> str:
    """The loopback address of one pod of one service; 0 is the gateway."""
    index = number * (REPLICAS + 1) + pod
    last = 2 * (index % 100) + (2 if pod == 0 else 1)
    return f"127.{10 + index // 10000}.{index // 100 % 100}.{last}"


def is_gateway(host: str) -> bool:
    """Whether an address is a gateway's."""
    return int(host.rpartition(".")[2] or 0) % 2 == 0


def manifest(key: ServiceKey) -> Json:
    """One service with two replicas."""
    initial = {"maxNumSeqs": {"initial": LIMITS[0]}, "maxNumBatchedTokens": {"initial": LIMITS[1]}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "slo": {"ttftMilliseconds": int(TARGET_MILLISECONDS)},
            "scaling": {"minReplicas": REPLICAS, "maxReplicas": 2 * REPLICAS},
            "batching": initial,
        },
    }


async def make_services(api: KubernetesApi, wanted: Iterable[ServiceKey]) -> None:
    """Create them, with their namespaces."""
    wanted = list(wanted)
    for name in sorted({key.namespace for key in wanted}):
        path = "/api/v1/namespaces"
        if await api._call("GET", f"{path}/{name}", absent_is_none=True) is None:
            await api._call("POST", path, body={"metadata": {"name": name}})
    await at_once(wanted, lambda key: api.create(manifest(key)))


async def make_pods(api: KubernetesApi, numbered: Iterable[tuple[int, ServiceKey, str]]) -> None:
    """A gateway and the replicas of each (number, service, hash of its revision), all of them ready."""
    pods = [
        (key, _pod(key, pod, revision), address(number, pod))
        for number, key, revision in numbered
        for pod in range(REPLICAS + 1)
    ]

    async def make(one: tuple[ServiceKey, Json, str]) -> None:
        key, pod, ip = one
        await api.create(pod)
        name = pod["metadata"]["name"]
        await api.patch("Pod", key.namespace, name, {"status": _ready(pod, ip)}, "status")

    await at_once(pods, make)


async def at_once(items: Iterable[Any], do: Callable[[Any], Awaitable[object]]) -> None:
    """Do it for all, so many at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(item: Any) -> None:
        async with slots:
            await do(item)

    await asyncio.gather(*(one(item) for item in items))


def _pod(key: ServiceKey, pod: int, revision: str) -> Json:
    component = RUNTIME_COMPONENT if pod else GATEWAY_COMPONENT
    labels = component_labels(key.name, component) | ({REVISION_LABEL: revision} if pod else {})
    labels[POD_TEMPLATE_HASH_LABEL] = TEMPLATE_HASH
    replica_set = f"{key.name}-{revision if pod else 'gateway'}-{TEMPLATE_HASH}"
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": replica_set, "uid": replica_set}
    metadata: Json = {"name": f"{replica_set}-{pod}", "namespace": key.namespace, "labels": labels}
    metadata["ownerReferences"] = [{**owner, "controller": True}]
    resources = {"limits": {"cpu": "4", "memory": "16Gi"}}
    container = {"name": component, "image": "image:1", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [container], "nodeName": "node1", "automountServiceAccountToken": False},
    }


def _ready(pod: Json, ip: str) -> Json:
    name = pod["spec"]["containers"][0]["name"]
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": one, "status": "True", "lastTransitionTime": READY_SINCE} for one in kinds],
        "containerStatuses": [
            {
                "name": name,
                "image": "image:1",
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": READY_SINCE}},
                "lastState": {},
            }
        ],
    }

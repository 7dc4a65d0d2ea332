"""What tests write to an API server without a node and read there: pods as a kubelet would tell of them."""

from collections.abc import Awaitable
from typing import Any

from headway_operator.cluster.kubernetes_api import API_VERSIONS, KubernetesApi
from headway_operator.names import component_labels
from headway_operator.state import ServiceKey

Json = dict[str, Any]
RUNNING = {"startedAt": "2026-01-02T03:04:05Z"}
CRASHED = {"exitCode": 1, "reason": "Error", "message": "loading\nValueError: no such layer\n"}


def condition(status: Any, name: str) -> Json:
    return next(c for c in status["conditions"] if c["type"] == name)


async def children(api: KubernetesApi, key: ServiceKey) -> dict[str, Json]:
    kinds = ("Deployment", "Service", "ServiceAccount", "ConfigMap", "Role", "RoleBinding")
    lists = {kind: await api.list(kind, key.namespace, "serving.headway.dev/service=demo") for kind in kinds}
    return {f"{kind} {item['metadata']['name']}": item for kind, items in lists.items() for item in items}


def pod(key: ServiceKey, name: str, component: str = "runtime") -> Json:
    labels = component_labels("demo", component) | {"serving.headway.dev/revision": "1a2b"}
    limits = {"memory": "2Gi", "nvidia.com/gpu": "1"}
    container = {"name": component, "image": "image:1", "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": key.namespace, "labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 600, "nodeName": "node1"},
    }


def status(*, ready: bool = False, restarts: int = 0, last: Json | None = None, **state: Json) -> Json:
    container = {
        "name": "runtime",
        "image": "image:1",
        "imageID": "",
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": {"terminated": last} if last else {},
    }
    flag = "True" if ready else "False"
    moved = "2026-01-02T03:04:05Z"
    return {
        "phase": "Running",
        "podIP": "10.1.2.3",
        "podIPs": [{"ip": "10.1.2.3"}],
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": flag, "lastTransitionTime": moved},
        ],
        "containerStatuses": [container],
    }


async def no_pods(api: KubernetesApi, key: ServiceKey) -> None:
    """There is no kubelet that would end one that is bound to a node."""
    for pod_ in await api.list("Pod", key.namespace):
        path = f"/api/v1/namespaces/{key.namespace}/pods/{pod_['metadata']['name']}"
        await api._call("DELETE", path, query={"gracePeriodSeconds": "0"}, absent_is_none=True)
    assert await api.list("Pod", key.namespace) == []


def created_dry(api: KubernetesApi, spec: Json) -> Awaitable[Any]:
    path = f"/apis/serving.headway.dev/{API_VERSIONS['InferenceService'].rpartition('/')[2]}"
    body = {
        "apiVersion": API_VERSIONS["InferenceService"],
        "kind": "InferenceService",
        "metadata": {"name": "dry"},
        "spec": spec,
    }
    return api._call("POST", f"{path}/namespaces/default/inferenceservices?dryRun=All", body=body)

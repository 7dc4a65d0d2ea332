"""What tests write to an API server without a node and read there: pods as a kubelet would tell of them."""

from collections.abc import Awaitable
from typing import Any

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_paths import API_VERSIONS
from headway_operator.names import KIND, POD_TEMPLATE_HASH_LABEL, REVISION_LABEL, component_labels
from headway_operator.state import ServiceKey

Json = dict[str, Any]
RUNNING = {"startedAt": "2026-01-02T03:04:05Z"}
TEMPLATE_HASH = "6f7c9d8b5"
CRASHED = {"exitCode": 1, "reason": "Error", "message": "loading\nValueError: no such layer\n"}


def condition(status: Any, name: str) -> Json:
    return next(c for c in status["conditions"] if c["type"] == name)


async def children(api: KubernetesApi, key: ServiceKey) -> dict[str, Json]:
    kinds = ("Deployment", "Service", "ServiceAccount", "ConfigMap", "Role", "RoleBinding")
    lists = {kind: await api.list(kind, key.namespace, "serving.headway.dev/service=demo") for kind in kinds}
    return {f"{kind} {item['metadata']['name']}": item for kind, items in lists.items() for item in items}


async def make_deployment(api: KubernetesApi, key: ServiceKey, name: str) -> None:
    """One of the service's own, without a pass over it: what `pod` makes counts only as its."""
    service = await api.get(KIND, key.namespace, key.name)
    assert service is not None
    owner = {name: service[name] for name in ("apiVersion", "kind")}
    owner |= {name: service["metadata"][name] for name in ("name", "uid")}
    labels = component_labels(key.name, "gateway" if name.endswith("-gateway") else "runtime")
    container = {"name": "any", "image": "image:1"}
    await api.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": name,
                "namespace": key.namespace,
                "labels": labels,
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        }
    )


def owned_by(kind: str, name: str) -> Json:
    """The metadata of a pod that a controller of that name has made."""
    owner = {"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": f"uid-of-{name}"}
    return {"ownerReferences": [{**owner, "controller": True}]}


def pod(key: ServiceKey, name: str, component: str = "runtime", revision: str = "1a2b") -> Json:
    """As the ReplicaSet of the revision's Deployment, or of the gateway's, makes it."""
    parent = "gateway" if component == "gateway" else revision
    labels = component_labels("demo", component) | {
        REVISION_LABEL: revision,
        POD_TEMPLATE_HASH_LABEL: TEMPLATE_HASH,
    }
    owner = owned_by("ReplicaSet", f"demo-{parent}-{TEMPLATE_HASH}")
    limits = {"memory": "2Gi", "nvidia.com/gpu": "1"}
    container = {"name": component, "image": "image:1", "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": key.namespace, "labels": labels, **owner},
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

"""The service under test: its manifest, and what can be seen of it through the API server."""

from pathlib import Path
from typing import Any

import yaml

from e2e.host_runtime import with_host_runtime
from e2e.kubernetes import Kubernetes, Object

MANIFEST = Path(__file__).parent / "manifests" / "quickstart.yaml"
NAMESPACE = "headway-e2e"
NAME = "demo"
SERVICE_LABEL = f"serving.headway.dev/service={NAME}"
RUNTIME_PODS = f"{SERVICE_LABEL},serving.headway.dev/component=runtime"
CHILD_KINDS = (
    "deployments,replicasets,pods,services,endpointslices,configmaps,secrets,"
    "serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies"
)
MAX_REPLICAS = 3
MAX_NUM_SEQS = 8
TTFT_MILLISECONDS = 500
FINISHED_METRIC = "headway_requests_finished_total"


def manifest(kubernetes: Kubernetes) -> Object:
    """The quickstart's service; each replica has a share of the machine, so one more is worth one more."""
    result: Object = yaml.safe_load(MANIFEST.read_text())
    result["metadata"] |= {"name": NAME, "namespace": NAMESPACE}
    result["spec"] |= {
        "slo": {"ttftMilliseconds": TTFT_MILLISECONDS},
        "scaling": {"minReplicas": 1, "maxReplicas": MAX_REPLICAS, "stabilizationSeconds": 20},
        "batching": {
            "maxNumSeqs": {"min": 1, "initial": 2, "max": MAX_NUM_SEQS},
            "maxNumBatchedTokens": {"min": 64, "initial": 256, "max": 1024},
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "400m", "memory": "2Gi"},
        },
    }
    return with_host_runtime(result) if kubernetes.has_pod_network else result


def status(kubernetes: Kubernetes) -> dict[str, Any]:
    """The status, empty before the operator has written one."""
    return dict(kubernetes.get("inferenceservice", NAME, NAMESPACE).get("status") or {})


def condition(kubernetes: Kubernetes, kind: str) -> str:
    """`True`, `False` or `Unknown`, with the reason; empty before the operator has said."""
    entries = status(kubernetes).get("conditions") or []
    return next((f"{entry['status']} {entry['reason']}" for entry in entries if entry["type"] == kind), "")


def runtime_pods(kubernetes: Kubernetes) -> list[Object]:
    return kubernetes.list("pods", NAMESPACE, RUNTIME_PODS)


def finished_requests(kubernetes: Kubernetes, pod: Object) -> float:
    """How many requests one replica has answered, by its own account."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:8000/proxy/metrics"
    lines = [line for line in kubernetes.raw(path).splitlines() if line.startswith(FINISHED_METRIC)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def workloads(kubernetes: Kubernetes) -> dict[str, Any]:
    """What an operator that changes nothing leaves alone: objects, their specs, the restarts of pods."""
    found: dict[str, Any] = {}
    for item in kubernetes.list("deployments,pods,services", NAMESPACE, SERVICE_LABEL):
        metadata = item["metadata"]
        restarts = [entry["restartCount"] for entry in item["status"].get("containerStatuses") or []]
        found[f"{item['kind']}/{metadata['name']}"] = (metadata["uid"], metadata.get("generation"), restarts)
    return found

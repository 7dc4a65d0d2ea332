"""Where the Kubernetes API has each kind that the operator reads or writes."""

from headway_operator.names import (
    API_VERSION,
    CACHE_KIND,
    CACHE_PLURAL,
    CLAIM,
    KIND,
    OPTIONAL_KINDS,
    PLURAL,
)

PLURALS = {
    "Deployment": "deployments",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "Pod": "pods",
    "Event": "events",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "Job": "jobs",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "PodMonitor": "podmonitors",
    "PrometheusRule": "prometheusrules",
    "LeaderWorkerSet": "leaderworkersets",
    "Lease": "leases",
    CLAIM: "persistentvolumeclaims",
    KIND: PLURAL,
    CACHE_KIND: CACHE_PLURAL,
}
API_VERSIONS = {
    "Deployment": "apps/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "Job": "batch/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    **OPTIONAL_KINDS,
    "Lease": "coordination.k8s.io/v1",
    KIND: API_VERSION,
    CACHE_KIND: API_VERSION,
}


def path_of(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """The REST path of a collection (of all namespaces: ""), an object or its subresource."""
    version = API_VERSIONS.get(kind, "v1")
    prefix = "/api" if "/" not in version else "/apis"
    where = ["namespaces", namespace] if namespace else []
    parts = [prefix, version, *where, PLURALS[kind], name, subresource]
    return "/".join(part for part in parts if part)

"""The PodDisruptionBudgets of the replicas and of the gateways: evictions take one at a time, whatever their
revision.

There is none while one replica is wanted: it could only let that one go, or hold up the drain of its node for
ever. A replica that is not ready serves nobody and may always be evicted.
"""

from collections.abc import Mapping
from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import InferenceServiceSpec, Service
from headway_operator.state import Manifest


def disruption_budget(service: Service) -> Manifest | None:
    """NAME, or None where there is to be none."""
    told = service.spec.disruption_budget
    if not told.enabled or replicas_of(service.spec, service.status) < 2:
        return None
    return _budget(service, names.safeguard(service.name), names.RUNTIME_COMPONENT, told.max_unavailable)


def gateway_disruption_budget(service: Service) -> Manifest | None:
    """NAME-gateway, or None where there is to be none, or one gateway alone."""
    if not service.spec.disruption_budget.enabled or service.spec.gateway.replicas < 2:
        return None
    return _budget(service, names.gateway(service.name), names.GATEWAY_COMPONENT, 1)


def _budget(service: Service, name: str, component: str, max_unavailable: int) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, name, names.component_labels(service.name, component)),
        "spec": {
            "maxUnavailable": max_unavailable,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.component_selector(service.name, component)},
        },
    }


def replicas_of(spec: InferenceServiceSpec, status: Mapping[str, Any]) -> int:
    """The fixed number, else what the last pass wanted, else the least."""
    if spec.replicas is not None:
        return spec.replicas
    return max(spec.scaling.min_replicas, int(status.get("desiredReplicas") or 0))

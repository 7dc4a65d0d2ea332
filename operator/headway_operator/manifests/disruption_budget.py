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
    selector: Mapping[str, Any] = _pods_of(service, names.RUNTIME_COMPONENT)
    if service.spec.nodes_per_replica > 1:
        # A pod that is evicted takes its group along, and holds up further ones until all of it is back.
        components = [names.RUNTIME_COMPONENT, names.WORKER_COMPONENT]
        selector = {
            "matchLabels": {names.SERVICE_LABEL: service.name},
            "matchExpressions": [{"key": names.COMPONENT_LABEL, "operator": "In", "values": components}],
        }
    name = names.safeguard(service.name)
    return _budget(service, name, names.RUNTIME_COMPONENT, told.max_unavailable, selector)


def gateway_disruption_budget(service: Service) -> Manifest | None:
    """NAME-gateway, or None where there is to be none, or one gateway alone."""
    if not service.spec.disruption_budget.enabled or service.spec.gateway.replicas < 2:
        return None
    name, component = names.gateway(service.name), names.GATEWAY_COMPONENT
    return _budget(service, name, component, 1, _pods_of(service, component))


def _pods_of(service: Service, component: str) -> Mapping[str, Any]:
    return {"matchLabels": names.component_selector(service.name, component)}


def _budget(
    service: Service, name: str, component: str, max_unavailable: int, selector: Mapping[str, Any]
) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, name, names.component_labels(service.name, component)),
        "spec": {
            "maxUnavailable": max_unavailable,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": selector,
        },
    }


def replicas_of(spec: InferenceServiceSpec, status: Mapping[str, Any]) -> int:
    """The fixed number, else what the last pass wanted, else the least."""
    if spec.replicas is not None:
        return spec.replicas
    return max(spec.scaling.min_replicas, int(status.get("desiredReplicas") or 0))

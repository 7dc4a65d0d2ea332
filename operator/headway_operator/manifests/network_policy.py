"""The NetworkPolicy around replicas and evaluations.

In: the gateway of this service, the operator, and Prometheus where it reads the replicas. Replicas that span
nodes reach each other's pods, and the cluster's names. A node always
reaches its own pods, so probes need no rule. Out: names, and what the sources of models need; a service whose
models lie on a disk reaches nothing. What else a pod of the user's template needs, such as a collector of
traces, is let out by a policy of the user's own: policies add up.

A cluster whose network knows no policies takes the object and does nothing.
"""

import re
from collections.abc import Iterable
from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.spec.fields import sources_of
from headway_operator.spec.source import REMOTE_SCHEMES, scheme_of
from headway_operator.state import Manifest, Site

HTTPS_PORT = 443
# 53, and where pods of CoreDNS listen that may not take it (OpenShift): policies see ports behind Services.
DNS_PORTS = (53, 5353)
_REGISTRY_PORT = re.compile(r"^oci://[^/:]+:([0-9]+)/")


def network_policy(service: Service, site: Site) -> Manifest | None:
    """NAME, or None where there is to be none, or where the operator's own address could not be let in."""
    if not service.spec.network_policy.enabled or not site.operator_namespace:
        return None
    components = [names.RUNTIME_COMPONENT, names.EVALUATION_COMPONENT]
    ingress = [{"from": _callers(service, site), "ports": [_port(names.HTTP_PORT)]}]
    egress = egress_of(sources_of(service.spec))
    if service.spec.nodes_per_replica > 1:
        components.append(names.WORKER_COMPONENT)
        peers = {"podSelector": _of_components(service, names.RUNTIME_COMPONENT, names.WORKER_COMPONENT)}
        # Ranks meet on ports of their own choice, and find their leader by its name.
        ingress.append({"from": [peers]})
        egress = [*(egress or [_names_service()]), {"to": [peers]}]
    labels = names.component_labels(service.name, names.RUNTIME_COMPONENT)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, names.safeguard(service.name), labels),
        "spec": {
            "podSelector": _of_components(service, *components),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _of_components(service: Service, *components: str) -> dict[str, Any]:
    return {
        "matchLabels": {names.SERVICE_LABEL: service.name},
        "matchExpressions": [{"key": names.COMPONENT_LABEL, "operator": "In", "values": [*components]}],
    }


def _callers(service: Service, site: Site) -> list[dict[str, Any]]:
    gateway = names.component_selector(service.name, names.GATEWAY_COMPONENT)
    callers: list[dict[str, Any]] = [
        {"podSelector": {"matchLabels": gateway}},
        {
            "namespaceSelector": _namespace(site.operator_namespace),
            "podSelector": {"matchLabels": names.OPERATOR_POD_LABELS},
        },
    ]
    if service.spec.monitoring.enabled and site.monitoring_namespace:
        callers.append({"namespaceSelector": _namespace(site.monitoring_namespace)})
    return callers


def egress_of(sources: Iterable[str]) -> list[dict[str, Any]]:
    """What fetching these may reach; nothing where none is fetched."""
    remote = [source for source in sources if scheme_of(source) in REMOTE_SCHEMES]
    if not remote:
        return []
    if any(scheme_of(source) == "s3" for source in remote):
        # The endpoint may stand in a Secret, with whatever port.
        ports: list[dict[str, Any]] = [{"protocol": "TCP"}]
    else:
        stated = {int(match[1]) for source in remote if (match := _REGISTRY_PORT.match(source))}
        ports = [_port(port) for port in sorted({HTTPS_PORT, *stated})]
    return [_names_service(), {"ports": ports}]


def _names_service() -> dict[str, Any]:
    return {"ports": [_port(port, protocol) for port in DNS_PORTS for protocol in ("UDP", "TCP")]}


def _namespace(name: str) -> dict[str, Any]:
    return {"matchLabels": {names.NAMESPACE_NAME_LABEL: name}}


def _port(port: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"port": port, "protocol": protocol}

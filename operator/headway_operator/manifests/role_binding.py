"""Gives the gateway's Role to its ServiceAccount."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def gateway_role_binding(service: Service) -> Manifest:
    """NAME-gateway."""
    name = names.gateway(service.name)
    labels = names.component_labels(service.name, names.GATEWAY_COMPONENT)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(service, name, labels),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": service.key.namespace}],
    }

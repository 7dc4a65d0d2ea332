"""What the gateway may read: the EndpointSlices of its namespace, and nothing else."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def gateway_role(service: Service) -> Manifest:
    """NAME-gateway. A watch cannot be narrowed to names that are made up by the cluster."""
    labels = names.component_labels(service.name, names.GATEWAY_COMPONENT)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(service, names.gateway(service.name), labels),
        "rules": [
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            }
        ],
    }

"""The gateway's ServiceAccount."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def gateway_service_account(service: Service) -> Manifest:
    """NAME-gateway."""
    labels = names.component_labels(service.name, names.GATEWAY_COMPONENT)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, names.gateway(service.name), labels),
    }

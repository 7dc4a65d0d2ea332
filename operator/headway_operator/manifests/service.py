"""The two Services: NAME for clients (points at the gateway), headless NAME-replicas for the gateway."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def client_service(service: Service) -> Manifest:
    """What clients talk to."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(
            service,
            names.service(service.name),
            names.component_labels(service.name, names.GATEWAY_COMPONENT),
        ),
        "spec": {
            "type": "ClusterIP",
            "selector": names.component_selector(service.name, names.GATEWAY_COMPONENT),
            "ports": [_port(names.SERVICE_PORT)],
        },
    }


def replicas_service(service: Service) -> Manifest:
    """Lists the runtime pods of every revision in its EndpointSlices; only ready ones count."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(
            service,
            names.replicas_service(service.name),
            names.component_labels(service.name, names.RUNTIME_COMPONENT),
        ),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": names.component_selector(service.name, names.RUNTIME_COMPONENT),
            "ports": [_port(names.HTTP_PORT)],
        },
    }


def _port(port: int) -> dict[str, object]:
    return {"name": names.HTTP_PORT_NAME, "port": port, "protocol": "TCP", "targetPort": names.HTTP_PORT}

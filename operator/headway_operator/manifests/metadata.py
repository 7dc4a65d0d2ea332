"""The metadata that every child carries: labels, namespace and the owner that takes it along when deleted."""

from typing import Any

from headway_operator.names import API_VERSION, KIND
from headway_operator.spec import Service


def metadata(service: Service, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Metadata of a child. Without a uid (local world) there is no owner to refer to."""
    result: dict[str, Any] = {"name": name, "namespace": service.key.namespace, "labels": labels}
    if service.uid:
        result["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
            }
        ]
    return result

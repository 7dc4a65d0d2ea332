"""The metadata that every child carries: labels, namespace and the owner that takes it along when deleted."""

from typing import Any

from headway_operator.names import API_VERSION
from headway_operator.spec import ModelCache, Service


def metadata(owner: Service | ModelCache, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Metadata of a child. Without a uid (local world) there is no owner to refer to."""
    result: dict[str, Any] = {"name": name, "namespace": owner.key.namespace, "labels": labels}
    if owner.uid:
        result["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": owner.kind,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
            }
        ]
    return result

"""The ConfigMap with the operator's public key, which is all that pods need to check admin tokens."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def admin_config_map(service: Service, public_key_pem: str) -> Manifest:
    """NAME-admin; `public_key_pem` may hold several PEM blocks while keys rotate."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(
            service, names.admin_config_map(service.name), names.service_labels(service.name)
        ),
        "data": {names.PUBLIC_KEY_FILE: public_key_pem},
    }

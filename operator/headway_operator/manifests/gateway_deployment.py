"""The gateway's Deployment. A new gateway is ready before an old one drains.

Its replicas are no part of it, as with those of a revision: they are set through the scale subresource, also
where the template is one of an earlier operator's that is kept as it is.
"""

from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def gateway_deployment(service: Service, template: dict[str, Any]) -> Manifest:
    """The Deployment NAME-gateway around a pod template."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(
            service,
            names.gateway(service.name),
            names.component_labels(service.name, names.GATEWAY_COMPONENT),
        ),
        "spec": {
            "revisionHistoryLimit": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": names.component_selector(service.name, names.GATEWAY_COMPONENT)},
            "template": template,
        },
    }

"""The Deployment of one revision. It states no replicas: those go through the scale subresource alone."""

from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest


def runtime_deployment(service: Service, template: dict[str, Any], template_hash: str) -> Manifest:
    """The Deployment NAME-HASH around a pod template."""
    labels = names.component_labels(service.name, names.RUNTIME_COMPONENT)
    labels[names.REVISION_LABEL] = template_hash
    pod_metadata = template["metadata"]
    pod_labels = {**pod_metadata["labels"], names.REVISION_LABEL: template_hash}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, names.revision(service.name, template_hash), labels),
        "spec": {
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": names.revision_selector(service.name, template_hash)},
            "template": {**template, "metadata": {**pod_metadata, "labels": pod_labels}},
        },
    }

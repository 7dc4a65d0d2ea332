"""The PodMonitor, by which the Prometheus operator reads replicas and gateway, where the cluster has it."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest, Site

KIND = "PodMonitor"


def pod_monitor(service: Service, site: Site) -> Manifest | None:
    """NAME, or None where there is to be none or the cluster has no such kind.

    Series carry the pods' labels for service, component and revision, as Prometheus writes them
    (`serving_headway_dev_service`).
    """
    told = service.spec.monitoring
    if not told.enabled or KIND not in site.optional_kinds:
        return None
    components = [names.RUNTIME_COMPONENT, names.GATEWAY_COMPONENT]
    return {
        "apiVersion": names.OPTIONAL_KINDS[KIND],
        "kind": KIND,
        "metadata": metadata(service, names.safeguard(service.name), monitoring_labels(service, site)),
        "spec": {
            "selector": {
                "matchLabels": {names.SERVICE_LABEL: service.name},
                "matchExpressions": [{"key": names.COMPONENT_LABEL, "operator": "In", "values": components}],
            },
            "podTargetLabels": [names.SERVICE_LABEL, names.COMPONENT_LABEL, names.REVISION_LABEL],
            "podMetricsEndpoints": [
                {
                    "port": names.HTTP_PORT_NAME,
                    "path": "/metrics",
                    "interval": f"{told.scrape_interval_seconds}s",
                }
            ],
        },
    }


def monitoring_labels(service: Service, site: Site) -> dict[str, str]:
    """Of a PodMonitor and a PrometheusRule: the site's, over them the service's, over both the operator's."""
    told = service.spec.monitoring.labels
    return {**dict(site.monitoring_labels), **told, **names.service_labels(service.name)}

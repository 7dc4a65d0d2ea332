"""The pod template of the gateway."""

from typing import Any

from headway_operator import names
from headway_operator.manifests import pod
from headway_operator.spec import Service
from headway_operator.state import Site

# A node may send new connections to a gateway for some seconds after it was told to end: nobody stands before
# the gateway who would try another one, so it goes on as before until every node has heard.
NOTICE_SECONDS = 5
RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}


def gateway_template(service: Service, site: Site, image: str) -> dict[str, Any]:
    """The gateway's pod template."""
    container: dict[str, Any] = {
        "name": names.GATEWAY_CONTAINER,
        "args": gateway_arguments(service, site),
        "ports": pod.ports(),
        "readinessProbe": pod.probe("/ready", period_seconds=2, timeout_seconds=5, failure_threshold=3),
        "livenessProbe": pod.probe("/health", period_seconds=10, timeout_seconds=5, failure_threshold=6),
        "resources": RESOURCES,
        "terminationMessagePolicy": pod.TERMINATION_MESSAGE_POLICY,
        "securityContext": pod.CONTAINER_SECURITY,
        "volumeMounts": pod.volume_mounts(site),
    }
    if site.kind == "kubernetes":
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(NOTICE_SECONDS)]}}}
    return {
        "metadata": {"labels": names.component_labels(service.name, names.GATEWAY_COMPONENT)},
        "spec": {
            **_spread(service, site),
            **pod.image_pull_secrets(site),
            "serviceAccountName": names.gateway(service.name),
            "enableServiceLinks": False,
            "securityContext": pod.POD_SECURITY,
            "terminationGracePeriodSeconds": service.spec.drain_timeout_seconds + pod.GRACE_MARGIN_SECONDS,
            "containers": [pod.with_image(container, image)],
            "volumes": pod.volumes(service),
        },
    }


def _spread(service: Service, site: Site) -> dict[str, Any]:
    """Over nodes as far as there are some; those of one template, since the others leave."""
    if site.kind != "kubernetes":
        return {}
    selector = names.component_selector(service.name, names.GATEWAY_COMPONENT)
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
        "matchLabelKeys": ["pod-template-hash"],
    }
    return {"topologySpreadConstraints": [constraint]}


def gateway_arguments(service: Service, site: Site) -> list[str]:
    """The arguments of `headway gateway`."""
    arguments = ["gateway", "--host", pod.host(site), "--port", str(site.bind_port)]
    if site.kind == "kubernetes":
        backends = f"{service.key.namespace}/{names.replicas_service(service.name)}"
        arguments += ["--kubernetes-service", backends]
    arguments += site.gateway_backend_arguments
    arguments += ["--drain-timeout-seconds", str(service.spec.drain_timeout_seconds)]
    return arguments + pod.admin_arguments(service, site)

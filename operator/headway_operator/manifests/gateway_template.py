"""The pod template of the gateway."""

from typing import Any

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests import pod
from headway_operator.manifests.placement import gateway_placement
from headway_operator.manifests.user_template import GATEWAYS, with_template
from headway_operator.spec import Service, parse_quantity
from headway_operator.state import Site

# A node may send new connections to a gateway for some seconds after it was told to end: nobody stands before
# the gateway who would try another one, so it goes on as before until every node has heard.
NOTICE_SECONDS = 5
DEFAULT_MEMORY = "512Mi"
RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": DEFAULT_MEMORY}}
# A gateway holds requests of half its memory at most: the rest is for itself and for what is in flight. The
# gateway's own default is half of DEFAULT_MEMORY.
HELD_DIVISOR = 2


def gateway_template(service: Service, site: Site, image: str) -> dict[str, Any]:
    """The gateway's pod template, the user's merged in. Raises SpecError."""
    ours, template = _template(service, site, image), service.spec.gateway.template
    account = names.gateway(service.name)
    made = ours if template is None else with_template(ours, template, site, GATEWAYS, account=account)
    container = next(one for one in made["spec"]["containers"] if one["name"] == names.GATEWAY_CONTAINER)
    container["args"] += _held_bytes_arguments(container)
    return made


def _held_bytes_arguments(container: dict[str, Any]) -> list[str]:
    """How much it may hold, where it has another memory limit than the one that its default is for."""
    limit = container.get("resources", {}).get("limits", {}).get("memory", DEFAULT_MEMORY)
    try:
        num_bytes = int(parse_quantity(limit))
    except ValueError as error:
        path = f"{GATEWAYS.field}.spec.containers[name={GATEWAYS.container}].resources.limits.memory"
        raise SpecError(path, str(error)) from error
    if num_bytes == parse_quantity(DEFAULT_MEMORY):
        return []
    return ["--max-waiting-bytes", str(num_bytes // HELD_DIVISOR)]


def _template(service: Service, site: Site, image: str) -> dict[str, Any]:
    told = service.spec.gateway.resources
    resources = (
        RESOURCES if told is None else told.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    )
    container: dict[str, Any] = {
        "name": names.GATEWAY_CONTAINER,
        "args": gateway_arguments(service, site),
        "ports": pod.ports(),
        "readinessProbe": pod.probe("/ready", period_seconds=2, timeout_seconds=5, failure_threshold=3),
        "livenessProbe": pod.probe("/health", period_seconds=10, timeout_seconds=5, failure_threshold=6),
        "resources": resources,
        "terminationMessagePolicy": pod.TERMINATION_MESSAGE_POLICY,
        "securityContext": pod.CONTAINER_SECURITY,
        "volumeMounts": pod.volume_mounts(site),
    }
    if site.kind == "kubernetes":
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(NOTICE_SECONDS)]}}}
    return {
        "metadata": {"labels": names.component_labels(service.name, names.GATEWAY_COMPONENT)},
        "spec": {
            **gateway_placement(service, site),
            **pod.image_pull_secrets(site),
            "serviceAccountName": names.gateway(service.name),
            "enableServiceLinks": False,
            "securityContext": pod.POD_SECURITY,
            "terminationGracePeriodSeconds": service.spec.drain_timeout_seconds + pod.GRACE_MARGIN_SECONDS,
            "containers": [pod.with_image(container, image)],
            "volumes": pod.volumes(service),
        },
    }


def gateway_arguments(service: Service, site: Site) -> list[str]:
    """The arguments of `headway gateway`."""
    arguments = ["gateway", "--host", pod.host(site), "--port", str(site.bind_port)]
    if site.kind == "kubernetes":
        backends = f"{service.key.namespace}/{names.replicas_service(service.name)}"
        arguments += ["--kubernetes-service", backends]
    arguments += site.gateway_backend_arguments
    arguments += ["--drain-timeout-seconds", str(service.spec.drain_timeout_seconds)]
    return arguments + pod.admin_arguments(service, site)

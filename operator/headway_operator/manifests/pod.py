"""What the pods of both components share: the restricted security context, probes, the mounted public key."""

from pathlib import PurePosixPath
from typing import Any

from headway_operator import names
from headway_operator.spec import Service
from headway_operator.state import Site

ADMIN_VOLUME = "admin"
TEMPORARY_VOLUME = "tmp"
TEMPORARY_PATH = "/tmp"
# Beyond the time to drain, for the process to notice the signal and to end.
GRACE_MARGIN_SECONDS = 15

POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
# A pod that crashed says its last words in its status, where the operator may read them without its logs.
TERMINATION_MESSAGE_POLICY = "FallbackToLogsOnError"
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def host(site: Site) -> str:
    """The address a process listens on: every interface in a pod, loopback in the local world."""
    if site.kind == "local":
        return "127.0.0.1"
    return every_address(is_ipv6=site.is_ipv6)


def every_address(*, is_ipv6: bool) -> str:
    """What stands for all of them: a cluster of IPv4 alone may have nodes without the other kind."""
    return "::" if is_ipv6 else "0.0.0.0"


def admin_arguments(service: Service, site: Site) -> list[str]:
    """Flags that open the admin API to this operator's tokens for this service."""
    return [
        "--admin-public-key-file",
        site.admin_public_key_path,
        "--admin-audience",
        names.audience(service.key),
    ]


def probe(path: str, *, period_seconds: int, timeout_seconds: int, failure_threshold: int) -> dict[str, Any]:
    """An HTTP probe of the container's own port."""
    return {
        "httpGet": {"path": path, "port": names.HTTP_PORT},
        "periodSeconds": period_seconds,
        "timeoutSeconds": timeout_seconds,
        "failureThreshold": failure_threshold,
    }


def ports() -> list[dict[str, Any]]:
    """The one port of either container."""
    return [{"name": names.HTTP_PORT_NAME, "containerPort": names.HTTP_PORT, "protocol": "TCP"}]


def volumes(service: Service) -> list[dict[str, Any]]:
    """The public key, and room to write where the root file system is read-only."""
    return [
        {"name": ADMIN_VOLUME, "configMap": {"name": names.admin_config_map(service.name)}},
        {"name": TEMPORARY_VOLUME, "emptyDir": {}},
    ]


def volume_mounts(site: Site) -> list[dict[str, Any]]:
    """Where `volumes` appear."""
    folder = str(PurePosixPath(site.admin_public_key_path).parent)
    return [
        {"name": ADMIN_VOLUME, "mountPath": folder, "readOnly": True},
        {"name": TEMPORARY_VOLUME, "mountPath": TEMPORARY_PATH},
    ]


def with_image(container: dict[str, Any], image: str) -> dict[str, Any]:
    """The container with its image; in the local world there is none."""
    return {**container, "image": image} if image else container


def image_pull_secrets(site: Site) -> dict[str, Any]:
    """The field of a pod's spec, where the operator was told of such Secrets."""
    found = [{"name": name} for name in site.image_pull_secrets]
    return {"imagePullSecrets": found} if found else {}

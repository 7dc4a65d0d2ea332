"""How a replica keeps prefixes that its KV cache has no room for: flags, and a volume for those on a disk.

The volume is the pod's own: it outlives the container, so that one that was started again finds what the last
one left, and ends with the pod.
"""

from decimal import Decimal
from typing import Any

from headway_operator.spec import InferenceServiceSpec, parse_quantity

VOLUME = "kv-offload"
FOLDER = "/var/cache/headway/kv-offload"
GIB = 2**30
# The kubelet ends a pod whose volume is larger than its limit: a file being written, and folders, take more
# than the engine's own limit counts.
SLACK_BYTES = GIB


def arguments(spec: InferenceServiceSpec) -> list[str]:
    """Flags of `headway serve`."""
    offload = spec.kv_offload
    if offload is None:
        return []
    flags = ["--kv-offloading-size", _gib(offload.host_memory)]
    if offload.disk is not None:
        flags += ["--kv-offloading-disk-path", FOLDER, "--kv-offloading-disk-size", _gib(offload.disk.size)]
    return flags


def volumes(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Room on the node's disk."""
    if spec.kv_offload is None or spec.kv_offload.disk is None:
        return []
    limit = int(parse_quantity(spec.kv_offload.disk.size)) + SLACK_BYTES
    return [{"name": VOLUME, "emptyDir": {"sizeLimit": str(limit)}}]


def volume_mounts(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Where `volumes` appear."""
    return [{"name": volume["name"], "mountPath": FOLDER} for volume in volumes(spec)]


def _gib(quantity: str | int) -> str:
    """As the flags have it; an int of bytes keeps its last one."""
    return format((Decimal(int(parse_quantity(quantity))) / GIB).normalize(), "f")

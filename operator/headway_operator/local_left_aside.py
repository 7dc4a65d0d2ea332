"""Which fields of a manifest say nothing to processes of one machine: set, and without effect there. Pure.

What would change how a process runs and cannot be had is refused elsewhere (`cluster/local_template.py`);
these only say where, as whom and within which bounds a pod runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

NOT_HELD = "a process is not held to it"
ALL_GPUS = "a process sees every GPU of this machine; CUDA_VISIBLE_DEVICES chooses"
NO_NODES = "there is one node"
NO_CLUSTER = "for a cluster alone"
# Beside this one there is no resource that a process is started by: its threads.
HONOURED_LIMIT = "cpu"
IN_SPEC = {
    "gpu": ALL_GPUS,
    "scheduling": NO_NODES,
    "networkPolicy": NO_CLUSTER,
    "disruptionBudget": NO_CLUSTER,
    "monitoring": NO_CLUSTER,
}
IN_POD = {
    **dict.fromkeys(
        (
            "affinity",
            "nodeName",
            "nodeSelector",
            "priorityClassName",
            "schedulerName",
            "tolerations",
            "topologySpreadConstraints",
        ),
        NO_NODES,
    ),
    **dict.fromkeys(
        ("imagePullSecrets", "resourceClaims", "securityContext", "serviceAccountName"), NO_CLUSTER
    ),
}
IN_CONTAINER = dict.fromkeys(("image", "imagePullPolicy", "securityContext"), NO_CLUSTER)


def left_aside(service: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each such field that an InferenceService sets, below `spec`, with the reason."""
    return list(_fields(service["spec"]))


def warning(service: Mapping[str, Any]) -> str:
    """All of them in one line, "" where there are none."""
    by_reason: dict[str, list[str]] = {}
    for field, reason in left_aside(service):
        by_reason.setdefault(reason, []).append(field)
    told = "; ".join(f"{', '.join(fields)} ({reason})" for reason, fields in by_reason.items())
    return f"set in the manifest, without effect on this machine: {told}" if told else ""


def _fields(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _resources("resources", spec.get("resources"))
    yield from _resources("quality.resources", (spec.get("quality") or {}).get("resources"))
    yield from _set(IN_SPEC, "", spec)
    gateway = spec.get("gateway") or {}
    if (gateway.get("replicas") or 1) > 1:
        yield "gateway.replicas", "there is one gateway"
    yield from _resources("gateway.resources", gateway.get("resources"))
    yield from _set({"scheduling": NO_NODES}, "gateway.", gateway)
    for field, template in (
        ("template", spec.get("template")),
        ("gateway.template", gateway.get("template")),
    ):
        yield from _pod(field, as_map(as_map(template).get("spec")))


def _pod(field: str, pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _set(IN_POD, f"{field}.spec.", pod)
    containers = pod.get("containers")
    for number, container in enumerate(containers if isinstance(containers, list) else ()):
        where, fields = f"{field}.spec.containers[{number}]", as_map(container)
        yield from _resources(f"{where}.resources", as_map(fields.get("resources")))
        yield from _set(IN_CONTAINER, f"{where}.", fields)
        if "preStop" in as_map(fields.get("lifecycle")):
            yield f"{where}.lifecycle.preStop", NO_CLUSTER


def as_map(value: Any) -> Mapping[str, Any]:
    """Empty for anything else: that a template has another shape is told by the first pass."""
    return value if isinstance(value, Mapping) else {}


def _set(reasons: Mapping[str, str], where: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field, reason in reasons.items():
        if fields.get(field) is not None:
            yield f"{where}{field}", reason


def _resources(where: str, resources: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    for part in ("requests", "limits"):
        for name in as_map((resources or {}).get(part)):
            if (part, name) != ("limits", HONOURED_LIMIT):
                is_device = "/" in name and not name.startswith("kubernetes.io/")
                yield f"{where}.{part}.{name}", ALL_GPUS if is_device else NOT_HELD
    if (resources or {}).get("claims"):
        yield f"{where}.claims", NO_CLUSTER

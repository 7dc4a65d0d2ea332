"""`spec.resources`: what a pod asks of its node. Shared by replicas, gateways, evaluations and fetches."""

from pydantic import Field

from headway_operator.spec.base import Name, Quantity, SpecModel

# As NVIDIA's device plugin names them.
GPU_RESOURCE = "nvidia.com/gpu"


def gpus_rule(path: str) -> tuple[str, str]:
    """CEL over the spec: where resources at `path` ask for GPUs, each process gets one. With its message.

    As an integer, since two quantities of any length cost more to compare than an API server allows.
    """
    limits = f"self.{path}.limits"
    parents = [path.rpartition(".")[0], path] if "." in path else [path]
    without = " || ".join(f"!has(self.{one})" for one in (*parents, f"{path}.limits"))
    rule = (
        f"self.device == 'cpu' || {without} || !('{GPU_RESOURCE}' in {limits}) || "
        f"quantity(string({limits}['{GPU_RESOURCE}'])).asInteger() >= self.tensorParallelSize / "
        "self.nodesPerReplica"
    )
    message = (
        f"{path}.limits must give each of tensorParallelSize processes a GPU of its own, on each of "
        f"nodesPerReplica nodes: raise {GPU_RESOURCE} there, or leave it out"
    )
    return rule, message


class ResourceClaim(SpecModel):
    """A claim of the pod's template."""

    name: Name
    """Name of an entry of spec.resourceClaims in the template of these pods. No default."""
    request: Name | None = None
    """Request inside the claim. Default: all of it."""


class Resources(SpecModel):
    """What each pod asks of its node, as Kubernetes writes it (CPU in cores, memory in bytes)."""

    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=32)
    """Most that each pod may use, by resource (`cpu`, `memory`, ...). Default: no limits."""
    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=32)
    """What the scheduler sets aside for each pod, by resource. Default: the limits."""
    claims: list[ResourceClaim] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Dynamic resource claims used by each pod, at most 16. Default: none."""

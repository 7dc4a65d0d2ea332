"""`spec.resources`: what a pod asks of its node. Shared by replicas and by what judges them."""

from pydantic import Field

from headway_operator.spec.base import Name, Quantity, SpecModel


class ResourceClaim(SpecModel):
    """A claim from the pod template's resourceClaims."""

    name: Name
    """Name of the entry in template.spec.resourceClaims. No default."""
    request: Name | None = None
    """Request inside the claim. Default: all of it."""


class Resources(SpecModel):
    """What each replica asks of its node, as Kubernetes writes it (CPU in cores, memory in bytes)."""

    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=32)
    """Most that a replica may use, by resource (`cpu`, `memory`, `nvidia.com/gpu`). Default: no limits."""
    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=32)
    """What the scheduler sets aside, by resource. Default: the limits."""
    claims: list[ResourceClaim] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Dynamic resource claims used by a replica, at most 16. Default: none."""

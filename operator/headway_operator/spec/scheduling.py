"""`spec.scheduling` and `spec.gpu`: on which nodes pods may run, and with which GPUs replicas do.

Words and meanings are those of a Kubernetes pod. What a pod has beyond them (affinity, runtime class, ...)
goes through `spec.template`.
"""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import Name, SpecModel, rules
from headway_operator.spec.resources import GPU_RESOURCE

# As NVIDIA's GPU feature discovery labels nodes.
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
_PREFIX = "([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)"
_WORD = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_KEY_PATTERN = f"^{_PREFIX}?{_WORD}$"
LABEL_VALUE_PATTERN = f"^({_WORD})?$"
EXTENDED_RESOURCE_PATTERN = f"^{_PREFIX}{_WORD}$"
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)]
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE_PATTERN)]
LONGEST_TOLERATION_SECONDS = 31_536_000  # a year

EXISTS_RULE = "self.operator != 'Exists' || !has(self.value)"
EXISTS_MESSAGE = "operator Exists compares no value: remove value, or set operator to Equal"
EQUAL_RULE = "self.operator != 'Equal' || has(self.key)"
EQUAL_MESSAGE = "operator Equal needs a key: set key, or set operator to Exists to tolerate every taint"
SECONDS_RULE = "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')"
SECONDS_MESSAGE = "tolerationSeconds is for effect NoExecute: remove tolerationSeconds or set effect"
DOMAINS_RULE = "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'"
DOMAINS_MESSAGE = "minDomains is for DoNotSchedule: remove minDomains or set whenUnsatisfiable"

GPU_DEVICE_RULE = "!has(self.gpu) || self.device != 'cpu'"
GPU_DEVICE_MESSAGE = "device cpu uses no GPU: remove gpu, or set device to cuda"
GPU_COUNT_RULE = (
    "!has(self.gpu) || !has(self.gpu.count) || "
    "self.gpu.count >= self.tensorParallelSize / self.nodesPerReplica"
)
GPU_COUNT_MESSAGE = (
    "gpu.count must give each of tensorParallelSize processes a GPU of its own, on each of nodesPerReplica "
    "nodes: raise gpu.count, or remove it"
)
GPU_TWICE_RULE = "!has(self.gpu) || !has(self.resources) || " + " && ".join(
    f"(!has(self.resources.{part}) || !(self.gpu.resourceName in self.resources.{part}))"
    for part in ("limits", "requests")
)
GPU_TWICE_MESSAGE = (
    "gpu and resources both say how many GPUs: remove gpu.resourceName from resources and set gpu.count"
)
GPU_LABEL_RULE = (
    "!has(self.gpu) || !has(self.gpu.product) || !has(self.scheduling) || !has(self.scheduling.nodeSelector) "
    "|| !(self.gpu.productLabel in self.scheduling.nodeSelector)"
)
GPU_LABEL_MESSAGE = (
    "gpu.product and scheduling.nodeSelector both choose by gpu.productLabel: set one of the two alone"
)
GPU_RULES = (
    (GPU_DEVICE_RULE, GPU_DEVICE_MESSAGE),
    (GPU_COUNT_RULE, GPU_COUNT_MESSAGE),
    (GPU_TWICE_RULE, GPU_TWICE_MESSAGE),
    (GPU_LABEL_RULE, GPU_LABEL_MESSAGE),
)


class Gpu(SpecModel):
    """The GPUs of each replica. `gpu: {}` asks for as many whole NVIDIA GPUs as the replica has processes."""

    resource_name: Annotated[str, Field(min_length=3, max_length=317, pattern=EXTENDED_RESOURCE_PATTERN)] = (
        GPU_RESOURCE
    )
    """Resource that the nodes' device plugin offers GPUs as; for a part of one for example
    nvidia.com/mig-3g.40gb. Default nvidia.com/gpu."""
    count: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs of each replica, on each of its nodes (1 to 64). At least, and by default, as many as it has
    processes there: tensorParallelSize divided by nodesPerReplica."""
    product: Annotated[str, Field(min_length=1, max_length=63, pattern=LABEL_VALUE_PATTERN)] | None = None
    """Kind of GPU, such as NVIDIA-H200: the value of productLabel that a node must have. Default: any."""
    product_label: LabelKey = GPU_PRODUCT_LABEL
    """Node label that names the kind of GPU. Default nvidia.com/gpu.product, which NVIDIA's GPU feature
    discovery writes."""


class Toleration(SpecModel):
    """A taint that pods put up with, as Kubernetes writes it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (EXISTS_RULE, EXISTS_MESSAGE), (EQUAL_RULE, EQUAL_MESSAGE), (SECONDS_RULE, SECONDS_MESSAGE)
        )
    )
    key: LabelKey | None = None
    """Key of the taint. Default: every key, which needs operator Exists."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the taint's value is compared. Default Equal."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal. Default: the empty one."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=LONGEST_TOLERATION_SECONDS)] | None = None
    """How long, in seconds, a pod stays on a node that gets a taint of effect NoExecute (0 to 31536000).
    Default: for ever."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError(f"{EXISTS_MESSAGE}; got value {self.value!r}")
        if self.operator == "Equal" and self.key is None:
            raise ValueError(EQUAL_MESSAGE)
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError(f"{SECONDS_MESSAGE}; got effect {self.effect!r}")
        return self


class TopologySpread(SpecModel):
    """How evenly pods are spread over parts of the cluster."""

    model_config = ConfigDict(json_schema_extra=rules((DOMAINS_RULE, DOMAINS_MESSAGE)))
    topology_key: LabelKey
    """Node label whose values are the parts, such as topology.kubernetes.io/zone or kubernetes.io/hostname.
    No default."""
    max_skew: Annotated[int, Field(ge=1, le=1000)] = 1
    """By how many pods two parts may differ (1 to 1000). Default 1."""
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    """What happens to a pod that cannot be placed so. Default ScheduleAnyway."""
    min_domains: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Fewest parts that there must be (1 to 1000), for DoNotSchedule. Default 1."""

    @model_validator(mode="after")
    def _counts_parts_where_they_bind(self) -> Self:
        if self.min_domains is not None and self.when_unsatisfiable != "DoNotSchedule":
            raise ValueError(DOMAINS_MESSAGE)
        return self


class Scheduling(SpecModel):
    """On which nodes pods may run."""

    node_selector: dict[str, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels that a node must have, at most 32. Default: none."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=32)
    """Taints that the pods put up with, at most 32. Default: none."""
    topology_spread_constraints: list[TopologySpread] = Field(
        default_factory=list,
        max_length=8,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["topologyKey", "whenUnsatisfiable"],
        },
    )
    """How evenly the pods are spread, at most 8; the operator adds the selector, of the gateways or of one
    revision alone. Default: as the scheduler is configured."""
    priority_class_name: Name | None = None
    """PriorityClass of the pods. Default: the cluster's."""

    @model_validator(mode="after")
    def _spreads_once_by_each_label(self) -> Self:
        seen = [(one.topology_key, one.when_unsatisfiable) for one in self.topology_spread_constraints]
        twice = [one for one in seen if seen.count(one) > 1]
        if twice:
            key, action = twice[0]
            raise ValueError(f"topologySpreadConstraints names {key!r} with {action} twice: remove one")
        return self

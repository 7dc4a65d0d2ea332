"""The fields of `spec`: the one source of the CRD, of its defaults, ranges, rules and descriptions.

pydantic refuses unknown fields. Knows nothing of clusters or of what is rendered.
"""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import (
    MemoryQuantity,
    Name,
    PodTemplateDict,
    SpecModel,
    rules,
)
from headway_operator.spec.batching import Batching
from headway_operator.spec.gateway import Gateway
from headway_operator.spec.lora import Lora
from headway_operator.spec.model import Model
from headway_operator.spec.quality import Quality
from headway_operator.spec.quantity import parse_quantity
from headway_operator.spec.resources import Resources, gpus_rule
from headway_operator.spec.rollout import Rollout
from headway_operator.spec.safeguards import DisruptionBudget, Monitoring, NetworkPolicy
from headway_operator.spec.scaling import Scaling
from headway_operator.spec.scheduling import GPU_RULES, Gpu, Scheduling
from headway_operator.spec.slo import Slo
from headway_operator.spec.source import REMOTE_SCHEMES, scheme_of
from headway_operator.spec.speculative import Speculative
from headway_operator.spec.waiting import Waiting

_REMOTE = ".matches('^(hf|s3|oci)://')"
CREDENTIALS_RULE = (
    f"!has(self.model.credentialsSecretRef) || self.model.source{_REMOTE} || (has(self.speculative) && "
    f"has(self.speculative.draft) && self.speculative.draft.source{_REMOTE}) || (has(self.lora) && "
    f"has(self.lora.adapters) && self.lora.adapters.exists(one, one.source{_REMOTE})) || "
    "(has(self.quality) && has(self.quality.baseline) && has(self.quality.baseline.source) && "
    f"self.quality.baseline.source{_REMOTE})"
)
CREDENTIALS_MESSAGE = (
    "model.credentialsSecretRef is for sources that are fetched, hf://, s3:// and oci://, of the model, its "
    "draft, adapters or baseline: remove credentialsSecretRef or change a source"
)
TARGET_RULE = (
    "has(self.replicas) || (has(self.slo) && "
    "(has(self.slo.ttftMilliseconds) || has(self.slo.tpotMilliseconds)))"
)
TARGET_MESSAGE = (
    "an autoscaled service needs a latency target: "
    "set slo.ttftMilliseconds or slo.tpotMilliseconds, or set replicas"
)
WAKE_RULE = (
    "has(self.replicas) || self.scaling.minReplicas > 0 || (self.waiting.maxRequests > 0 && "
    "(!has(self.waiting.timeoutSeconds) || self.waiting.timeoutSeconds > 0))"
)
WAKE_MESSAGE = (
    "with scaling.minReplicas 0 a request that is held wakes the service: let waiting.maxRequests and "
    "waiting.timeoutSeconds be 1 or more, or raise scaling.minReplicas"
)
# As `service` has them, which names the field.
DISK_RULE = "self.tensorParallelSize == 1 || !has(self.kvOffload) || !has(self.kvOffload.disk)"
DISK_MESSAGE = (
    "kvOffload.disk is for one process: several could lose different files of one block; remove disk, or set "
    "tensorParallelSize to 1"
)
CACHING_RULE = "self.prefixCaching || !has(self.kvOffload)"
CACHING_MESSAGE = (
    "kvOffload keeps what the prefix cache has no room for: remove kvOffload, or set prefixCaching to true"
)
# As numbers: two quantities of any length cost more to compare than an API server allows.
HOST_MEMORY_RULE = (
    "!has(self.kvOffload) || !has(self.resources) || !has(self.resources.limits) || "
    "!('memory' in self.resources.limits) || "
    "quantity(string(self.kvOffload.hostMemory)).asApproximateFloat() < double(self.nodesPerReplica) * "
    "quantity(string(self.resources.limits['memory'])).asApproximateFloat()"
)
HOST_MEMORY_MESSAGE = (
    "kvOffload.hostMemory is of the memory that resources.limits.memory bounds, on all nodesPerReplica nodes "
    "together, and weights need some of it: lower kvOffload.hostMemory or raise resources.limits.memory"
)

NODES_RULE = "self.tensorParallelSize % self.nodesPerReplica == 0"
NODES_MESSAGE = (
    "nodesPerReplica must divide tensorParallelSize, so that each node has equally many processes: change "
    "one of the two"
)
JUDGED_RULE = "self.nodesPerReplica == 1 || !has(self.quality)"
JUDGED_MESSAGE = (
    "quality judges the model in one pod, which one of several nodes could not hold: remove quality, or set "
    "nodesPerReplica to 1"
)
# A pod that could take longer to go would hold up the drain of its node.
LONGEST_DRAIN_SECONDS = 3600


class OffloadDisk(SpecModel):
    """A disk of the node's, below host memory."""

    size: MemoryQuantity
    """What files there may take, a quantity in bytes such as 50Gi. They live as long as the pod. No
    default."""


class KVOffload(SpecModel):
    """Where prefixes go that the KV cache has no room for. It changes no answer."""

    host_memory: MemoryQuantity
    """Main memory of each replica, a quantity in bytes such as 8Gi; resources must leave room for it. No
    default."""
    disk: OffloadDisk | None = None
    """A disk that gets what is in that memory, too, and keeps it for longer. Default: none."""


class SecretKeyRef(SpecModel):
    """One key of a Secret in the service's namespace."""

    name: Name
    """Name of the Secret. No default."""
    key: Name = "api-keys"
    """Key inside the Secret. Default api-keys."""


class Auth(SpecModel):
    """Who may send requests."""

    api_keys_secret_ref: SecretKeyRef
    """Secret with the accepted API keys, one per line. A replica reads it when it starts. No default."""


class InferenceServiceSpec(SpecModel):
    """What to serve, how fast, and within which bounds."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (TARGET_RULE, TARGET_MESSAGE),
            (WAKE_RULE, WAKE_MESSAGE),
            (CREDENTIALS_RULE, CREDENTIALS_MESSAGE),
            (DISK_RULE, DISK_MESSAGE),
            (CACHING_RULE, CACHING_MESSAGE),
            (HOST_MEMORY_RULE, HOST_MEMORY_MESSAGE),
            (NODES_RULE, NODES_MESSAGE),
            (JUDGED_RULE, JUDGED_MESSAGE),
            gpus_rule("resources"),
            gpus_rule("quality.resources"),
            *GPU_RULES,
        )
    )
    model: Model
    """The model to serve. No default."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights and activations. Default auto: what the model's config states; on a CPU
    bfloat16 for quantized weights of a float16 model, where products of them take that alone."""
    quantization: Literal["auto", "none", "fp8", "int8", "int4", "awq", "gptq", "compressed-tensors"] = "auto"
    """How weights are packed: fp8, int8 and int4 quantize a plain checkpoint when a replica loads it; the
    other names, none too, are what the checkpoint must be. Default auto: what the checkpoint says."""
    weight_compression: Literal["auto", "none"] = "auto"
    """Whether bfloat16 weights are kept in 12 bits each on CPUs whose products read them so, which changes no
    number; none keeps them in 16. Default: auto."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share each layer of one replica, a GPU each (1 to 64). It must divide the model's
    attention heads and MLP sizes. With device cuda a replica asks for as many GPUs unless resources say it.
    Default 1."""
    nodes_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """Nodes that the processes of one replica are on, equally many on each (1 to 64); it must divide
    tensorParallelSize. Above 1 a replica is a group of as many pods, and the cluster needs LeaderWorkerSet;
    resources and gpu.count are then of each pod. Default 1."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"] = "auto"
    """Number format of the KV cache. fp8 (the same as fp8_e4m3) and int8 take one byte per number and a scale
    per token and head, so that the same memory holds nearly twice the tokens of bfloat16. Default auto: what
    the checkpoint asks for (kv_cache_scheme), else as dtype."""
    prefix_caching: bool = True
    """Whether requests use what was computed for others that begin alike. Default true."""
    kv_offload: KVOffload | None = None
    """Where prefixes go that the KV cache has no room for. Default: nowhere, they are lost."""
    speculative: Speculative | None = None
    """Speculative decoding. Default: none."""
    lora: Lora | None = None
    """LoRA adapters. Default: none."""
    slo: Slo | None = None
    """The latency promise. Default: none, which needs a fixed number of replicas."""
    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Fixed number of replicas (0 to 1000). Default: unset, which lets the controller choose within
    scaling."""
    scaling: Scaling = Scaling()
    """Bounds of autoscaling. Default: those of its fields."""
    batching: Batching = Batching()
    """Bounds of the live batch limits. Default: those of its fields."""
    quality: Quality | None = None
    """Judgement before traffic: a template is served only once an evaluation has held the model against its
    baseline and passed it. Default: none, everything is served at once."""
    kv_cache_memory: MemoryQuantity | None = None
    """Memory for the KV cache of one replica, a quantity in bytes such as 512Mi. Default: the engine
    chooses."""
    memory_check: Literal["Enforce", "Warn"] = "Enforce"
    """What a replica does that, by the arithmetic, will not fit into the memory it finds free. Enforce: it
    ends before any weights are loaded, and the reason is DoesNotFit; Warn: it says so in its log and tries.
    Default Enforce."""
    resources: Resources = Resources()
    """Resources of each replica, `nvidia.com/gpu` too unless gpu says it. Default: none asked."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a replica computes. Default auto: cuda when a GPU is visible, else cpu."""
    gpu: Gpu | None = None
    """GPUs of each replica, of which kind, and how many. Default: what resources say, and with device cuda
    and a tensorParallelSize above 1 that many."""
    scheduling: Scheduling | None = None
    """On which nodes replicas may run. Editing it makes a new revision. Default: on any."""
    auth: Auth | None = None
    """Who may send requests. Default: everyone who reaches the Service."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach replicas, and whom they may reach. Default: enabled."""
    disruption_budget: DisruptionBudget = DisruptionBudget()
    """How many replicas an eviction may take at a time. Default: enabled."""
    monitoring: Monitoring = Monitoring()
    """What is made for the Prometheus operator. Default: enabled."""
    drain_timeout_seconds: Annotated[int, Field(ge=1, le=LONGEST_DRAIN_SECONDS)] = 60
    """Longest time, in seconds, that a replica or gateway may take to finish its requests when it is removed
    (1 to 3600). Where the longest answer that is promised takes longer (model.maxModelLen tokens at the
    targets of slo, or slo.endToEndMilliseconds), pods have that long instead, an hour at most;
    status.revision.drainTimeoutSeconds says what they have. Default 60."""
    rollout: Rollout = Rollout()
    """How a changed template takes the place of the one that serves. Default: those of its fields."""
    gateway: Gateway = Gateway()
    """What stands between clients and replicas. Default: those of its fields."""
    waiting: Waiting = Waiting()
    """Requests that the gateway holds while no replica can take them. Default: those of its fields."""
    suspend: bool = False
    """Whether to serve nothing for now: every replica is drained and removed, requests are refused, all else
    stays. False brings back as many replicas as there were. Default false."""
    template: PodTemplateDict | None = None
    """Pod template merged strategically over the replicas' own; name the container `runtime` to change it.
    Default: none."""

    @model_validator(mode="after")
    def _autoscaling_has_target(self) -> Self:
        targets = () if self.slo is None else (self.slo.ttft_milliseconds, self.slo.tpot_milliseconds)
        if self.replicas is None and not any(targets):
            raise ValueError(TARGET_MESSAGE)
        return self

    @model_validator(mode="after")
    def _fits_on_its_nodes(self) -> Self:
        nodes = self.nodes_per_replica
        if self.tensor_parallel_size % nodes:
            raise ValueError(f"{NODES_MESSAGE}; they are {nodes} and {self.tensor_parallel_size}")
        if nodes > 1 and self.quality is not None:
            raise ValueError(f"{JUDGED_MESSAGE}; it is {nodes}")
        return self

    @model_validator(mode="after")
    def _offloads_what_it_caches_into_its_memory(self) -> Self:
        offload, limit = self.kv_offload, self.resources.limits.get("memory")
        if offload is None:
            return self
        if not self.prefix_caching:
            raise ValueError(CACHING_MESSAGE)
        if limit is not None:
            wanted, there = (
                parse_quantity(offload.host_memory),
                parse_quantity(limit) * self.nodes_per_replica,
            )
            if wanted >= there:
                raise ValueError(f"{HOST_MEMORY_MESSAGE}; they are {offload.host_memory!r} and {limit!r}")
        return self

    @property
    def has_gpu(self) -> bool:
        """A GPU is there where it is asked for: a pod that asks for none sees none."""
        if self.device != "auto":
            return self.device == "cuda"
        named = {*self.resources.limits, *self.resources.requests}
        return self.gpu is not None or bool(self.resources.claims) or any("gpu" in name for name in named)

    @property
    def highest_limits(self) -> tuple[int, int]:
        """The upper ends of the batch limits, of sequences and tokens, defaults applied."""
        return self.batching.most_seqs(has_gpu=self.has_gpu), self.batching.max_num_batched_tokens.max

    @property
    def initial_limits(self) -> tuple[int, int]:
        """The batch limits at start, of sequences and tokens, defaults applied."""
        seqs = self.batching.max_num_seqs.initial
        return self.highest_limits[0] if seqs is None else seqs, self.batching.initial_tokens

    @property
    def processes_per_node(self) -> int:
        """Processes in each pod of a replica."""
        return self.tensor_parallel_size // self.nodes_per_replica

    @model_validator(mode="after")
    def _can_be_woken(self) -> Self:
        may_sleep = self.replicas is None and self.scaling.min_replicas == 0
        if may_sleep and 0 in (self.waiting.max_requests, self.waiting.timeout_seconds):
            raise ValueError(WAKE_MESSAGE)
        return self

    @model_validator(mode="after")
    def _credentials_are_for_what_is_fetched(self) -> Self:
        is_remote = any(scheme_of(source) in REMOTE_SCHEMES for source in sources_of(self))
        if self.model.credentials_secret_ref is not None and not is_remote:
            raise ValueError(f"{CREDENTIALS_MESSAGE}; model.source is {self.model.source!r}")
        return self


def sources_of(spec: InferenceServiceSpec) -> list[str]:
    """Everything that the service reads weights from, the model first."""
    found = [spec.model.revised_source]
    if spec.speculative is not None and spec.speculative.draft is not None:
        found.append(spec.speculative.draft.source)
    found.extend(adapter.source for adapter in (() if spec.lora is None else spec.lora.adapters))
    if spec.quality is not None and spec.quality.baseline.source is not None:
        found.append(spec.quality.baseline.source)
    return found

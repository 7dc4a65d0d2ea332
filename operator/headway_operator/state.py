"""The frozen values that pass between the steps of a reconcile: Observed, Sample, Decision, Plan.

Pure data. Times are seconds since the epoch, passed in from outside; nothing here reads a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headway_operator.names import ChildKey, ServiceKey
from headway_operator.spec import Manifest

__all__ = [
    "Attainment",
    "ChildKey",
    "Decision",
    "Evaluation",
    "EvaluationPhase",
    "Gateway",
    "GatewaySample",
    "Histogram",
    "Limits",
    "Manifest",
    "Observed",
    "Plan",
    "Rendered",
    "Replica",
    "ReplicaPhase",
    "ReplicaSample",
    "Revision",
    "RevisionPin",
    "Sample",
    "ServiceKey",
    "Site",
    "Targets",
]

ReplicaPhase = Literal["pending", "starting", "ready", "draining", "failed"]
EvaluationPhase = Literal["pending", "running", "ended", "timed_out", "lost"]


@dataclass(frozen=True, slots=True)
class Site:
    """What differs between the worlds in which a service is rendered; given by the cluster implementation.

    runtime_image, gateway_image: default images (empty in the local world).
    gateway_backend_arguments: how the gateway finds replicas (flags of `headway gateway`).
    admin_public_key_path: where a replica and the gateway read the operator's public keys.
    bind_port: the port a process listens on; 0 lets it choose (local world).
    """

    kind: Literal["kubernetes", "local"]
    runtime_image: str
    gateway_image: str
    admin_public_key_path: str
    gateway_backend_arguments: tuple[str, ...]
    bind_port: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One runtime pod or process as the cluster reports it.

    revision: the hash of its revision (the value of its revision label).
    phase: `pending` not started (unscheduled, pulling), `starting` runs but is not ready, `failed` crashed or
    cannot start. reason and message carry the real cause when it is not ready (ImagePullBackOff, OOMKilled,
    Unschedulable, CrashLoopBackOff with its last line).
    """

    name: str
    revision: str
    phase: ReplicaPhase
    address: str | None
    created_at: float
    ready_at: float | None = None
    reason: str = ""
    message: str = ""
    num_restarts: int = 0
    deletion_cost: int = 0


@dataclass(frozen=True, slots=True)
class Revision:
    """One runtime Deployment of the service: `name` is NAME-HASH, `hash` that of its rendered template."""

    name: str
    hash: str
    replicas: int
    created_at: float


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway in front of the replicas. `addresses` are those of its processes (for samples)."""

    ready: bool = False
    addresses: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One run of `headway eval` over what the service would serve, as the cluster reports it.

    output: what its last attempt left behind; a verdict when it came to one. message: the cause while it
    cannot run, and how it ended, in words. lost: it came to its end, and what it left behind is gone.
    """

    name: str
    phase: EvaluationPhase
    message: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster's view of one service's children at one instant."""

    revisions: tuple[Revision, ...] = ()
    replicas: tuple[Replica, ...] = ()
    gateway: Gateway = Gateway()
    children: frozenset[ChildKey] = frozenset()
    url: str = ""
    evaluations: tuple[Evaluation, ...] = ()
    other_scaler: str = ""  # the HPA or ScaledObject that targets the same object, if one does


@dataclass(frozen=True, slots=True)
class Limits:
    """The live batch limits of a replica (`max_num_seqs`, `max_num_batched_tokens`)."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Targets:
    """SLO targets in milliseconds; None means none."""

    ttft_milliseconds: float | None = None
    tpot_milliseconds: float | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket since the replica started, with the edges the replica states (milliseconds).

    edges: upper bounds; counts has one more entry than edges, the last being those above every edge.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum_milliseconds: float


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica's `/admin/sample`, version 1.

    instance: changes when its engine restarts (counters begin anew). counters: the named totals since start.
    histograms: ttft, queue, prefill, tpot, step.
    """

    instance: str
    taken_at: float
    limits: Limits
    envelope: Limits
    targets: Targets
    running: int
    waiting: int
    oldest_waiting_seconds: float
    kv_blocks_used: int
    kv_blocks_total: int
    draining: bool
    counters: Mapping[str, int]
    histograms: Mapping[str, Histogram]


@dataclass(frozen=True, slots=True)
class GatewaySample:
    """One gateway's `/admin/sample`: what waits or was refused before a replica accepted it."""

    instance: str
    taken_at: float
    waiting: int
    oldest_waiting_seconds: float
    in_flight: int
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """All samples of one pass. A ready replica without a usable sample maps to None; `errors` says why."""

    taken_at: float
    replicas: Mapping[str, ReplicaSample | None] = field(default_factory=dict)
    gateways: Mapping[str, GatewaySample | None] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attainment:
    """How one latency stands against its target over the window that was judged."""

    target_milliseconds: float | None
    p_milliseconds: float | None  # at slo.percentile; None without evidence
    met: int
    missed: int
    verdict: Literal["met", "violated", "unknown"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller wants, and why, in one sentence a person can read.

    cause: stable CamelCase reason. blocker: what keeps it from doing more, or "".
    evidence: the numbers behind it.
    """

    at: float
    replicas: int
    limits: Limits
    cause: str
    message: str
    blocker: str
    ttft: Attainment
    tpot: Attainment
    evidence: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RevisionPin:
    """What was fixed when the current revision was made; kept in `status.revision`.

    hash: of the rendered runtime pod template; name is NAME-HASH. gateway_hash: of the gateway's.
    spec_hash: of everything the user wrote that shapes either template. While it stays the same, nothing
    rolls, whatever images or rendering a newer operator brings.
    """

    name: str
    hash: str
    runtime_image: str
    gateway_image: str
    gateway_hash: str
    spec_hash: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """The children a service should have: `manifests` to apply; `keep` also names those left as they are.

    withheld: the name of a revision that waits for its verdict, or "". While nothing else serves, `revision`
    is that very one, and there is no Deployment of it.
    """

    revision: RevisionPin
    manifests: tuple[Manifest, ...]
    keep: frozenset[ChildKey]
    withheld: str = ""

    @property
    def serves_nothing(self) -> bool:
        """Whether no revision may have replicas yet."""
        return self.revision.name == self.withheld


@dataclass(frozen=True, slots=True)
class Plan:
    """What the appliers must do. Everything in it is idempotent.

    scale: revision name -> replicas. deletion_costs: replica -> pod-deletion-cost, to be set before `scale`.
    patch: replica name -> the body of PATCH /admin/limits that it still lacks.
    manifests: children to apply. keep: children not to prune.
    """

    manifests: tuple[Manifest, ...]
    keep: frozenset[ChildKey]
    scale: Mapping[str, int]
    patch: Mapping[str, Mapping[str, Any]]
    deletion_costs: Mapping[str, int]

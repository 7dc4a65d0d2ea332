"""The frozen values that pass between the steps of a reconcile: Observed, Decision, Plan (`samples`: Sample).

Pure data. Times are seconds since the epoch, passed in from outside; nothing here reads a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headway_operator.names import ChildKey, ServiceKey
from headway_operator.samples import Limits, Routing
from headway_operator.spec import Manifest

__all__ = [
    "Attainment",
    "ChildKey",
    "Decision",
    "Evaluation",
    "EvaluationPhase",
    "Gateway",
    "Loss",
    "Manifest",
    "Observed",
    "Plan",
    "Rendered",
    "Replica",
    "ReplicaPhase",
    "Revision",
    "RevisionPin",
    "ServiceKey",
    "Site",
    "Start",
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
    is_ipv6: whether the cluster's own addresses are of IPv6.
    operator_namespace: where the operator runs in a pod; "" where it does not.
    monitoring_namespace: where Prometheus runs. monitoring_labels: by which it selects, on every service's
    monitors; a service's own come on top. runbook_url: of the page that says what to do about their alerts.
    image_pull_secrets: names of Secrets, in the namespace of each service, with which its pods pull images.
    allows_unrestricted: whether users' pod templates may leave the standard "restricted".
    optional_kinds: those of OPTIONAL_KINDS that this cluster has now.
    """

    kind: Literal["kubernetes", "local"]
    runtime_image: str
    gateway_image: str
    admin_public_key_path: str
    gateway_backend_arguments: tuple[str, ...]
    bind_port: int
    operator_namespace: str = ""
    monitoring_namespace: str = ""
    monitoring_labels: tuple[tuple[str, str], ...] = ()
    runbook_url: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    allows_unrestricted: bool = False
    optional_kinds: frozenset[str] = frozenset()
    is_ipv6: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Where the time of a replica's first start went, as far as the cluster sees it; seconds.

    scheduled: until it had a node. pulled: from then until its container began, init containers left out.
    initialized: what those took. served: from the container's beginning until it was ready.
    """

    scheduled_seconds: float
    pulled_seconds: float
    initialized_seconds: float
    served_seconds: float


@dataclass(frozen=True, slots=True)
class Replica:
    """One runtime pod or process as the cluster reports it.

    revision: the hash of its revision (the value of its revision label).
    phase: `pending` not started (unscheduled, pulling), `starting` runs but is not ready, `failed` crashed or
    cannot start. reason and message carry the real cause when it is not ready (ImagePullBackOff, OOMKilled,
    Unschedulable, CrashLoopBackOff with its last line). num_restarts: of the server itself, on whichever of
    its nodes; not of what prepares its pod or runs beside it. start: of one that is ready and of which
    nothing was ever restarted.
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
    start: Start | None = None


# The reason of a replica whose server runs on and only does not answer that it is ready any more.
UNREADY = "ReadinessProbeFailed"


def is_crashing(replica: Replica) -> bool:
    """Failed, or starting once more after a failure that is its reason still."""
    is_again = replica.phase == "starting" and replica.num_restarts > 0 and replica.reason != UNREADY
    return bool(replica.reason) and (replica.phase == "failed" or is_again)


# Reasons of a replica that has no node.
_UNPLACED = ("Unschedulable", "FailedCreate", "QuotaExceeded")


def is_unplaced(replica: Replica) -> bool:
    """Whether no place has been found for it."""
    return replica.reason in _UNPLACED


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica that was taken away for good: evicted, preempted, its node lost, refused by its node."""

    name: str
    reason: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Revision:
    """One runtime Deployment of the service: `name` is NAME-HASH, `hash` that of its rendered template.

    kind: of its object; a LeaderWorkerSet where each replica spans nodes.
    """

    name: str
    hash: str
    replicas: int
    created_at: float
    kind: str = "Deployment"


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway in front of the replicas. `addresses` are those of its processes (for samples).

    reason and message: of a pod of it that does not serve, whether or not another one does; or of one that
    cannot be made. waits_since: when that pod was made, of one that has not begun yet; None of any other.
    replicas: how many pods its Deployment is to have; None without one.
    """

    ready: bool = False
    addresses: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""
    replicas: int | None = None
    waits_since: float | None = None


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
    other_scaler: str = ""  # the HPA, such as a ScaledObject makes, of the same object
    losses: tuple[Loss, ...] = ()  # those of which the cluster still has a trace, the latest first


@dataclass(frozen=True, slots=True)
class Attainment:
    """How one latency stands against its target over the window that was judged."""

    target_milliseconds: float | None
    p_milliseconds: float | None  # at slo.percentile; None without evidence
    met: int
    missed: int
    verdict: Literal["met", "violated", "unknown"]


NOT_PROMISED = Attainment(None, None, 0, 0, "unknown")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller wants, and why, in one sentence a person can read.

    cause: stable CamelCase reason. blocker: what keeps it from doing more, or "".
    evidence: the numbers behind it; `recommended_replicas` is the candidate, before what forbids it.
    end_to_end: reported and judged; nothing is moved for it. advice: what would help where no live knob does,
    or "". sick: which replicas alone break the promise, or "".
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
    end_to_end: Attainment = NOT_PROMISED
    advice: str = ""
    sick: str = ""


@dataclass(frozen=True, slots=True)
class RevisionPin:
    """What was fixed when the current revision was made; kept in `status.revision`.

    hash: of the rendered runtime pod template; name is NAME-HASH. gateway_hash: of the gateway's.
    spec_hash: of everything the user wrote that shapes replicas; gateway_spec_hash: gateways alone, "" where
    that is nothing. While they stay the same, nothing rolls, whatever images or rendering a newer operator
    brings. drain_timeout_seconds: what its pods have; 0 in one of before it was kept, which had the spec's.
    """

    name: str
    hash: str
    runtime_image: str
    gateway_image: str
    gateway_hash: str
    spec_hash: str
    gateway_spec_hash: str = ""
    drain_timeout_seconds: int = 0


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
    patch: replica name -> the body of PATCH /admin/limits that it still lacks. route: address of a gateway ->
    what it should go by and does not yet.
    manifests: children to apply. keep: children not to prune.
    """

    manifests: tuple[Manifest, ...]
    keep: frozenset[ChildKey]
    scale: Mapping[str, int]
    patch: Mapping[str, Mapping[str, Any]]
    deletion_costs: Mapping[str, int]
    route: Mapping[str, Routing] = field(default_factory=dict)

"""The fields of `status`: what the operator writes. Source of the CRD's status schema."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from headway_operator.spec.base import STATUS_CONFIG
from headway_operator.spec.rollout_status import RevisionStatus, RolloutStatus


class StatusModel(BaseModel):
    """camelCase outside; every field optional, since a status grows as facts come in."""

    model_config = STATUS_CONFIG


class Condition(StatusModel):
    """One fact about the service, as Kubernetes writes conditions."""

    type: Annotated[str, Field(max_length=64)]
    """Ready, Progressing, SLOMet, SLOFeasible, ScalingActive, ModelAvailable, Degraded or QualityVerified."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=128)]
    """Stable CamelCase cause."""
    message: Annotated[str, Field(max_length=4096)]
    """One sentence for a person."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When `status` last changed."""
    observed_generation: int
    """The generation of the spec that was judged."""


class LimitsStatus(StatusModel):
    """Live batch limits of each replica."""

    max_num_seqs: int | None = None
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens that one step computes."""


class LatencyStatus(StatusModel):
    """One latency against its target over the window that was judged."""

    target: float | None = None
    """Target in milliseconds."""
    value: float | None = None
    """Measured latency at `percentile`, in milliseconds."""
    percentile: int | None = None
    """The percentile judged."""
    attainment: float | None = None
    """Share of requests within the target (0 to 1)."""
    verdict: Literal["met", "violated", "unknown"] | None = None
    """What the evidence allows to say at 90% confidence."""


class SloStatus(StatusModel):
    """Latencies against their targets."""

    ttft_milliseconds: LatencyStatus | None = None
    """Time to first token."""
    tpot_milliseconds: LatencyStatus | None = None
    """Time per output token after the first."""
    end_to_end_milliseconds: LatencyStatus | None = None
    """Time of whole answers; absent without such a target."""


class LastDecision(StatusModel):
    """The controller's last decision and why."""

    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When it was taken."""
    since: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """Since when every decision has wanted the same, for the same cause and with the same blocker."""
    replicas: int | None = None
    """Replicas wanted."""
    candidate_replicas: int | None = None
    """Replicas that the load asks for, before bounds, patience and what blocks more have their say; absent
    where the controller does not count them."""
    max_num_seqs: int | None = None
    """Live limit wanted, in sequences."""
    max_num_batched_tokens: int | None = None
    """Live limit wanted, in tokens."""
    cause: str | None = None
    """Stable CamelCase cause."""
    message: str | None = None
    """One sentence with the numbers behind it."""
    blocker: str | None = None
    """What keeps the controller from doing more; empty when nothing does."""


class QualityCheck(StatusModel):
    """One number against its limit."""

    name: str
    """What was measured."""
    limit: float
    """The most that passes."""
    passed: bool
    """Whether it did."""
    unit: Literal["nats", "share", "points"]
    """Of value and limit; a share of 0.01 is one percent."""
    value: float | None = None
    """The number; absent when it was not finite."""
    note: str | None = None
    """What a reader should know of it."""


class QualityText(StatusModel):
    """What the scored text came to; numbers that were not finite are absent."""

    name: str
    """The file."""
    tokens: int
    """Tokens scored."""
    perplexity: float | None = None
    """Of the model."""
    baseline_perplexity: float | None = None
    """Of the baseline."""
    mean_kl: float | None = None
    """Mean KL divergence of next-token distributions from the baseline's, in nats."""
    p99_kl: float | None = None
    """Its 99th percentile."""
    same_choice_share: float | None = None
    """Share of positions with the same likeliest token (0 to 1)."""


class QualityTasks(StatusModel):
    """What one file of tasks came to."""

    name: str
    """The file."""
    tasks: int
    """Tasks in it."""
    right: int
    """Tasks that the model got right."""
    baseline_right: int
    """Tasks that the baseline got right."""
    lost: int
    """Tasks that only the baseline got right."""
    won: int
    """Tasks that only the model got right."""


class QualityJudgement(StatusModel):
    """The end of one evaluation."""

    hash: str
    """Of what was judged."""
    reason: Literal["Passed", "Failed", "TimedOut", "JobFailed"]
    """How it ended."""
    message: str
    """The numbers in words, or why there are none."""
    finished_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the operator saw it end."""
    checks: Annotated[list[QualityCheck], Field(max_length=32)] = []
    """Each number against its limit."""
    text: QualityText | None = None
    """What the text came to."""
    tasks: Annotated[list[QualityTasks], Field(max_length=32)] = []
    """What each file of tasks came to."""


class QualityStatus(StatusModel):
    """What the gate on quality says of what is asked for, and what it remembers of earlier verdicts."""

    reason: str | None = None
    """As in the condition QualityVerified."""
    hash: str | None = None
    """Of what is judged: model, levers, baseline, limits, files and image."""
    job: str | None = None
    """Name of the Job that judges it."""
    withheld: str | None = None
    """Name of the revision that is not served before it is verified."""
    finished_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When the operator saw the evaluation end."""
    checks: Annotated[list[QualityCheck], Field(max_length=32)] = []
    """Each number against its limit."""
    text: QualityText | None = None
    """What the text came to."""
    tasks: Annotated[list[QualityTasks], Field(max_length=32)] = []
    """What each file of tasks came to."""
    history: Annotated[list[QualityJudgement], Field(max_length=16)] = []
    """The latest judgements, the current one first; what stands here is not judged again."""


class StartSeconds(StatusModel):
    """Where the time of a start went, in seconds; what is not known is absent."""

    scheduled_seconds: float | None = None
    """Until a node was found."""
    pulled_seconds: float | None = None
    """From then until the container began: images, volumes."""
    fetched_seconds: float | None = None
    """Bringing the model to the node, init containers included; near 0 for one that is there."""
    loaded_seconds: float | None = None
    """Reading the weights and bringing them to the device."""
    warm_seconds: float | None = None
    """Measuring memory, recording steps, until the first request could be answered."""
    total_seconds: float | None = None
    """From the pod's creation until it was ready."""


class ReplicaStart(StartSeconds):
    """The start of one replica."""

    replica: str
    """Name of the pod."""
    ready_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it was ready."""


class StartupStatus(StatusModel):
    """How long replicas take to start, and where the time goes."""

    recent: Annotated[list[ReplicaStart], Field(max_length=16)] = []
    """The latest starts, the newest first."""
    median: StartSeconds | None = None
    """The median of each number over them."""


class Display(StatusModel):
    """Short texts for the columns of `kubectl get`."""

    replicas: str | None = None
    """Ready of wanted replicas."""
    ttft: str | None = None
    """Measured TTFT against its target."""
    tpot: str | None = None
    """Measured TPOT against its target."""
    quality: str | None = None
    """The verdict of spec.quality."""


class InferenceServiceStatus(StatusModel):
    """What the operator last saw and decided."""

    observed_generation: int | None = None
    """The generation of the spec that this status is about."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = []
    """What holds and why."""
    replicas: int | None = None
    """Runtime pods that exist, of every revision."""
    ready_replicas: int | None = None
    """Runtime pods that can serve."""
    desired_replicas: int | None = None
    """Runtime pods wanted."""
    selector: str | None = None
    """Label selector of the runtime pods, for the scale subresource."""
    url: str | None = None
    """Where clients send requests."""
    limits: LimitsStatus | None = None
    """Live batch limits applied."""
    slo: SloStatus | None = None
    """Latencies against targets."""
    revision: RevisionStatus | None = None
    """The current revision."""
    rollout: RolloutStatus | None = None
    """The rollout under way, and what is remembered of the last ones."""
    quality: QualityStatus | None = None
    """The verdict of spec.quality with its numbers."""
    recommendation: Annotated[str, Field(max_length=1024)] | None = None
    """What would help where no live knob and no number of replicas does; absent while one may."""
    startup: StartupStatus | None = None
    """How long the latest replicas took to start."""
    last_decision: LastDecision | None = None
    """The controller's last decision."""
    earlier_decisions: Annotated[list[LastDecision], Field(max_length=16)] = []
    """The decisions before it that said something else, the latest first."""
    display: Display | None = None
    """Short texts for the columns of `kubectl get`."""
    updated_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When this status was written."""

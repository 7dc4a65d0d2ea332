"""`status.revision` and `status.rollout`: which revision serves, which is to follow, which was given up."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from headway_operator.spec.base import STATUS_CONFIG

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class _Status(BaseModel):
    model_config = STATUS_CONFIG


class RevisionStatus(_Status):
    """What was fixed when the current revision was made; an operator upgrade changes none of it."""

    name: str | None = None
    """Name of the runtime Deployment."""
    hash: str | None = None
    """Content hash of the runtime's pod template."""
    runtime_image: str | None = None
    """Image of the runtime container."""
    gateway_image: str | None = None
    """Image of the gateway container."""
    gateway_hash: str | None = None
    """Content hash of the gateway's pod template."""
    spec_hash: str | None = None
    """Hash of the parts of the spec that shape a replica's template."""
    gateway_spec_hash: str | None = None
    """Hash of the parts of spec.gateway that shape a gateway's template alone; empty where there are none."""
    drain_timeout_seconds: int | None = None
    """Seconds that its pods have to finish their requests: as spec.drainTimeoutSeconds, or as the longest
    answer takes that was promised when it was made."""


class RolloutFailure(_Status):
    """A revision that was given up; it is not tried again until the spec changes."""

    name: str
    """Name of the revision."""
    spec_hash: str
    """Hash of the parts of the spec that shaped it."""
    reason: Annotated[str, Field(max_length=128)]
    """Stable CamelCase cause."""
    message: Annotated[str, Field(max_length=4096)]
    """What happened, in one sentence."""
    failed_at: Time
    """When it was given up."""


class RolloutStatus(_Status):
    """The rollout under way, and what the operator remembers of the last ones."""

    stable: RevisionStatus | None = None
    """The revision that had all its replicas ready last; where the next one fails, it serves on."""
    candidate: str | None = None
    """Name of the revision that is to follow; absent when none is."""
    started_at: Time | None = None
    """When the candidate's rollout began."""
    progressed_at: Time | None = None
    """When it last made progress; absent while no replica is wanted."""
    ready_replicas: int | None = None
    """The most replicas of the candidate that were ready at once."""
    older_replicas: int | None = None
    """The fewest replicas of other revisions that remained."""
    step: int | None = None
    """Steps of rollout.canary that the candidate has passed."""
    weight: int | None = None
    """Share of the requests that the candidate gets, in percent; absent outside a canary."""
    step_started_at: Time | None = None
    """When the candidate began to get that share, or when the step was last repeated."""
    slowness: Literal["suspected", "cleared"] | None = None
    """suspected: the step is repeated, as the candidate was slower in it. cleared: it was not so again."""
    failed: RolloutFailure | None = None
    """The revision that was given up last, while the spec still asks for it."""

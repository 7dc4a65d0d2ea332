"""`spec.rollout`: how a changed template takes the place of the one that serves, and when it is given up."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import SpecModel, rules, with_empty_default

STEPS_RULE = "!has(self.steps) || self.steps.isSorted()"
STEPS_MESSAGE = "each share must not be less than the one before it: put canary.steps into rising order"
Percent = Annotated[int, Field(ge=1, le=99)]


class Canary(SpecModel):
    """A small share of the requests first, judged by slo, errors, and the revision that serves beside it."""

    model_config = ConfigDict(json_schema_extra=rules((STEPS_RULE, STEPS_MESSAGE)))
    steps: list[Percent] = Field(default=[5, 25, 50], min_length=1, max_length=10)
    """Shares of the requests that the new revision gets, one after the other, in percent (1 to 99; up to 10
    steps, rising). Default 5, 25, 50."""
    hold_seconds: Annotated[int, Field(ge=10, le=86_400)] = 300
    """How long each step lasts at least, in seconds (10 to 86400). Default 300."""
    min_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 50
    """Requests that the new revision must have answered in a step before it is promoted, so that there is
    something to judge by (0 to 1000000); those that do not come within progressDeadlineSeconds end the
    rollout. Default 50."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if sorted(self.steps) != self.steps:
            raise ValueError(f"steps {self.steps!r}: {STEPS_MESSAGE}")
        return self


class Rollout(SpecModel):
    """How a changed template takes the place of the one that serves. Editing it never restarts a pod."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    progress_deadline_seconds: Annotated[int, Field(ge=10, le=172_800)] | None = None
    """How long a rollout may make no progress, in seconds (10 to 172800), before the revision that served
    before takes its place again. Default: what a replica may take to start, 1800; 7200 where its model has to
    be fetched."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 1
    """How many replicas fewer than wanted may serve where there is no room for old and new ones at once (0 to
    1000); 0 waits for room. Default 1: one out, one in."""
    canary: Canary | None = None
    """A small share of the requests first. Default: none, new replicas take requests as they become ready."""

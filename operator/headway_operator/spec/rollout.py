"""`spec.rollout`: how a changed template takes the place of the one that serves, and when it is given up."""

import re
from math import ceil
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from headway_operator.spec.base import SpecModel, rules, with_empty_default

STEPS_RULE = "!has(self.steps) || self.steps.isSorted()"
STEPS_MESSAGE = "each share must not be less than the one before it: put canary.steps into rising order"
PERCENTAGE_PATTERN = "^(100|[1-9]?[0-9])%$"
MOST_SURGE = 1000
MOVES_RULE = (
    "self.maxUnavailable > 0 || (type(self.maxSurge) == int ? self.maxSurge > 0 : self.maxSurge != '0%')"
)
MOVES_MESSAGE = (
    "with maxSurge and maxUnavailable both 0 no rollout could begin: raise rollout.maxSurge or "
    "rollout.maxUnavailable"
)


def _is_surge(value: int | str) -> int | str:
    is_fine = 0 <= value <= MOST_SURGE if isinstance(value, int) else re.search(PERCENTAGE_PATTERN, value)
    if not is_fine:
        raise ValueError(f"{value!r} is neither 0 to {MOST_SURGE} nor 0% to 100%; write for example 1 or 25%")
    return value


Surge = Annotated[
    int | str,
    AfterValidator(_is_surge),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": 0,
            "maximum": MOST_SURGE,
            "pattern": PERCENTAGE_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
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

    model_config = ConfigDict(json_schema_extra=with_empty_default((MOVES_RULE, MOVES_MESSAGE)))
    progress_deadline_seconds: Annotated[int, Field(ge=10, le=172_800)] | None = None
    """How long a rollout may make no progress, in seconds (10 to 172800), before the revision that served
    before takes its place again. Default: what a replica may take to start, 1800; 7200 where its model has to
    be fetched."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 1
    """How many replicas fewer than wanted may serve where there is no room for old and new ones at once (0 to
    1000); 0 waits for room. Default 1: one out, one in."""
    max_surge: Surge = "100%"
    """How many replicas more than wanted may exist while old ones make way for new ones: a number (0 to 1000)
    or a percentage of those wanted (0% to 100%), rounded up. 0 takes one out before one comes in, at most
    maxUnavailable at a time. Default 100%: all new ones come first, where there is room."""
    canary: Canary | None = None
    """A small share of the requests first. Default: none, new replicas take requests as they become ready."""

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        if self.max_unavailable == 0 and self.max_surge in (0, "0%"):
            raise ValueError(MOVES_MESSAGE)
        return self

    def surge(self, wanted: int) -> int:
        """Replicas beyond those wanted, in their number."""
        told = self.max_surge
        return told if isinstance(told, int) else ceil(wanted * int(told.removesuffix("%")) / 100)

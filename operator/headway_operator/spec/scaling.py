"""`spec.scaling`: within which bounds the controller moves replicas, and when other bounds hold."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import SpecModel, with_empty_default
from headway_operator.spec.schedule import ScheduleEntry

ORDER_RULE = "self.minReplicas <= self.maxReplicas"
ORDER_MESSAGE = (
    "minReplicas must not exceed maxReplicas: lower scaling.minReplicas or raise scaling.maxReplicas"
)
FLOOR_RULE = (
    "!has(self.schedule) || self.schedule.all(one, has(one.maxReplicas) || !has(one.minReplicas) || "
    "one.minReplicas <= self.maxReplicas)"
)
FLOOR_MESSAGE = (
    "minReplicas of an entry of scaling.schedule must not exceed scaling.maxReplicas: raise that, or set "
    "maxReplicas in the entry"
)
CEILING_RULE = (
    "!has(self.schedule) || self.schedule.all(one, has(one.minReplicas) || !has(one.maxReplicas) || "
    "one.maxReplicas >= self.minReplicas)"
)
CEILING_MESSAGE = (
    "maxReplicas of an entry of scaling.schedule must not be less than scaling.minReplicas, below which it "
    "cannot go: raise maxReplicas there or lower scaling.minReplicas"
)


class Scaling(SpecModel):
    """Bounds of autoscaling; unused while `replicas` is set."""

    model_config = ConfigDict(
        json_schema_extra=with_empty_default(
            (ORDER_RULE, ORDER_MESSAGE), (FLOOR_RULE, FLOOR_MESSAGE), (CEILING_RULE, CEILING_MESSAGE)
        )
    )
    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Fewest replicas (0 to 1000). With 0, a service that nobody asks has none, and the first request starts
    one. Default 1."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = 4
    """Most replicas (1 to 1000). Default 4."""
    stabilization_seconds: Annotated[int, Field(ge=10, le=3600)] = 120
    """How long, in seconds, fewer replicas must have been enough before one is removed (10 to 3600), and no
    less than twice what a replica takes to start, as measured. A removal that has to be taken back makes it
    three times as long for the next ones, up to half an hour. Default 120."""
    idle_seconds: Annotated[int, Field(ge=10, le=86_400)] | None = None
    """How long, in seconds, no request must have come before the last replicas are removed (10 to 86400);
    used while minReplicas is 0. Default: ten minutes, or five times what a replica takes to start where that
    is longer."""
    schedule: list[ScheduleEntry] = Field(default_factory=list, max_length=16)
    """Other bounds at known times, such as more replicas before the office opens; at most 16 entries. Where
    several hold at once, the largest of each bound counts. Default: none."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} must not exceed maxReplicas {self.max_replicas}: "
                "lower scaling.minReplicas or raise scaling.maxReplicas"
            )
        for number, entry in enumerate(self.schedule):
            low, high = entry.min_replicas, entry.max_replicas
            if high is None and low is not None and low > self.max_replicas:
                raise ValueError(f"schedule[{number}].minReplicas {low}: {FLOOR_MESSAGE}")
            if low is None and high is not None and high < self.min_replicas:
                raise ValueError(f"schedule[{number}].maxReplicas {high}: {CEILING_MESSAGE}")
        return self

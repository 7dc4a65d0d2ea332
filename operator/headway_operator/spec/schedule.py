"""`spec.scaling.schedule`: other bounds of autoscaling for a part of each day, week or year."""

from datetime import UTC, datetime
from typing import Annotated, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from headway_operator.spec.base import SpecModel, rules

# Five fields out of which `cron` expressions are made; what they come to is read by the operator.
CRON_PATTERN = r"^[0-9*,/-]+( +[0-9A-Za-z*,/#-]+){4}$"
ZONE_PATTERN = r"^[A-Za-z][A-Za-z0-9_+/-]*$"
BOUND_RULE = "has(self.minReplicas) || has(self.maxReplicas)"
BOUND_MESSAGE = "an entry of scaling.schedule needs a bound: set minReplicas, maxReplicas or both there"
WINDOW_ORDER_RULE = "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas"
WINDOW_ORDER_MESSAGE = (
    "minReplicas must not exceed maxReplicas in an entry of scaling.schedule: lower one or raise the other"
)
ENDS_RULE = "self.start != self.end"
ENDS_MESSAGE = "start and end of an entry of scaling.schedule must differ: change end"
# An unknown zone is an error of the expression, which refuses the manifest with the message.
ZONE_RULE = "timestamp('2026-01-01T00:00:00Z').getHours(self.timeZone) >= 0"
ZONE_MESSAGE = "timeZone must be a name of the IANA time zone database, such as Europe/Berlin or UTC"


def _is_cron(expression: str) -> str:
    try:
        found = next(CronSim(expression, datetime.now(UTC)), None)
    except CronSimError as error:
        raise ValueError(
            f"{expression!r} is no time of cron ({error}); write minute, hour, day of the month, month and "
            "day of the week, for example 0 8 * * MON-FRI"
        ) from error
    if found is None:
        raise ValueError(f"{expression!r} never comes; change its day or month")
    return expression


def _is_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # the last: a folder among the zones
        raise ValueError(f"{ZONE_MESSAGE}; got {name!r}") from error
    return name


Cron = Annotated[str, AfterValidator(_is_cron), Field(min_length=9, max_length=100, pattern=CRON_PATTERN)]
Zone = Annotated[str, AfterValidator(_is_zone), Field(min_length=1, max_length=64, pattern=ZONE_PATTERN)]


class ScheduleEntry(SpecModel):
    """Other bounds from each `start` until the `end` that follows."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (BOUND_RULE, BOUND_MESSAGE),
            (WINDOW_ORDER_RULE, WINDOW_ORDER_MESSAGE),
            (ENDS_RULE, ENDS_MESSAGE),
            (ZONE_RULE, ZONE_MESSAGE),
        )
    )
    start: Cron
    """When it begins, as cron writes times: minute, hour, day of the month, month, day of the week, such as
    `0 8 * * MON-FRI`. No default."""
    end: Cron
    """When it ends, written likewise. No default."""
    time_zone: Zone = "UTC"
    """Time zone of both, a name of the IANA database such as Europe/Berlin; its summer time is followed.
    Default UTC."""
    min_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Fewest replicas meanwhile (1 to 1000), where that is more than scaling.minReplicas. They are asked for
    early, by what a replica takes to start, so that they are ready at `start`. Default:
    scaling.minReplicas."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Most replicas meanwhile (1 to 1000), in place of scaling.maxReplicas. Default: scaling.maxReplicas."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        low, high = self.min_replicas, self.max_replicas
        if low is None and high is None:
            raise ValueError(BOUND_MESSAGE)
        if low is not None and high is not None and low > high:
            raise ValueError(f"{WINDOW_ORDER_MESSAGE}; got {low} and {high}")
        if self.start == self.end:
            raise ValueError(f"{ENDS_MESSAGE}; both are {self.start!r}")
        return self

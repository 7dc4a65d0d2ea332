"""`spec.slo`: the latency that is promised."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import SpecModel, rules

# What the controller remembers, and the shortest window that it judges (`slo`).
LONGEST_WINDOW_SECONDS, SHORTEST_WINDOW_SECONDS = 300, 30

WHOLE_RULE = (
    "!has(self.endToEndMilliseconds) || !has(self.ttftMilliseconds) || "
    "self.endToEndMilliseconds >= self.ttftMilliseconds"
)
WHOLE_MESSAGE = (
    "a whole answer takes no less than its first token: raise slo.endToEndMilliseconds or lower "
    "slo.ttftMilliseconds"
)


class Slo(SpecModel):
    """The latency promise. Editing it never restarts a pod."""

    model_config = ConfigDict(json_schema_extra=rules((WHOLE_RULE, WHOLE_MESSAGE)))
    ttft_milliseconds: Annotated[int, Field(ge=1, le=600_000)] | None = None
    """Target for the time to first token, waiting included, in milliseconds (1 to 600000). Default: none."""
    tpot_milliseconds: Annotated[int, Field(ge=1, le=60_000)] | None = None
    """Target for the time per output token after the first, in milliseconds (1 to 60000). Default: none."""
    end_to_end_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Target for the time of a whole answer, waiting included, in milliseconds (1 to 3600000). It is
    reported, judged in SLOMet and alerted on; replicas and batch limits follow the other two. Default:
    none."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Share of requests that must meet the targets, in percent (50 to 99). Default 95."""
    window_seconds: Annotated[int, Field(ge=SHORTEST_WINDOW_SECONDS, le=LONGEST_WINDOW_SECONDS)] = (
        LONGEST_WINDOW_SECONDS
    )
    """How far back requests are judged, in seconds (30 to 300). The controller begins with the last 30 s and
    looks back further, at most so far, until there were requests enough for a verdict. Default 300."""

    @model_validator(mode="after")
    def _whole_is_no_less_than_its_start(self) -> Self:
        whole, first = self.end_to_end_milliseconds, self.ttft_milliseconds
        if whole is not None and first is not None and whole < first:
            raise ValueError(f"{WHOLE_MESSAGE}; they are {whole} and {first}")
        return self

"""`spec.waiting`: how many requests the gateway holds while no replica can take them, and for how long."""

from typing import Annotated

from pydantic import ConfigDict, Field

from headway_operator.spec.base import SpecModel, with_empty_default

TIMEOUT_SECONDS = 30.0
# Where a request may have to wait for a replica to start: as long as the openai client waits by default.
WAKING_TIMEOUT_SECONDS = 600.0


class Waiting(SpecModel):
    """Requests that the gateway holds while no replica can take them; others are answered 503 with
    Retry-After. Editing it restarts nothing."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    max_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Most requests held at once (0 to 1000000). Default 1024."""
    timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """How long each is held at most, in seconds (0 to 86400). Default 30; 600 while scaling.minReplicas is 0,
    since a replica may have to start first."""

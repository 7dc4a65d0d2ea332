"""`spec.gateway`: what stands between clients and replicas. Editing it restarts nothing."""

from typing import Annotated

from pydantic import ConfigDict, Field

from headway_operator.spec.base import SpecModel, with_empty_default


class Gateway(SpecModel):
    """The gateway in front of the replicas."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    replicas: Annotated[int, Field(ge=1, le=32)] = 1
    """Pods of the gateway (1 to 32), spread over nodes; each holds as many requests as waiting says, and
    counts the load of replicas by what it sent them itself. On one machine (`headway up`) there is one
    whatever this says. Default 1."""

"""`spec.gateway`: what stands between clients and replicas. Editing it restarts no replica."""

from typing import Annotated

from pydantic import ConfigDict, Field

from headway_operator.spec.base import PodTemplateDict, SpecModel, with_empty_default
from headway_operator.spec.resources import Resources
from headway_operator.spec.scheduling import Scheduling


class Gateway(SpecModel):
    """The gateway in front of the replicas. Editing it restarts no replica: its number is changed live, the
    rest makes its pods anew, each before an old one drains."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    replicas: Annotated[int, Field(ge=1, le=32)] = 1
    """Pods of the gateway (1 to 32), spread over nodes; each holds as many requests as waiting says, and
    counts the load of replicas by what it sent them itself. On one machine (`headway up`) there is one
    whatever this says. Default 1."""
    resources: Resources | None = None
    """Resources of each pod of the gateway, in place of the default as a whole. Half of the memory limit is
    for requests that it holds. Default: 100m of CPU and 128Mi of memory asked, 512Mi of memory at most."""
    scheduling: Scheduling | None = None
    """On which nodes gateways may run. Default: on any, spread over nodes as far as there are some."""
    template: PodTemplateDict | None = None
    """Pod template merged strategically over the gateways' own; name the container `gateway` to change it.
    Default: none."""

"""`spec.networkPolicy`, `spec.disruptionBudget` and `spec.monitoring`: what stands around a service's pods.

None of it is part of a pod: switching it restarts nothing.
"""

import re
from typing import Annotated

from pydantic import ConfigDict, Field, field_validator

from headway_operator import names
from headway_operator.spec.base import SpecModel, with_empty_default
from headway_operator.spec.scheduling import LABEL_KEY_PATTERN, LabelValue

# The fields of the spec that these are.
SAFEGUARDS = frozenset(("network_policy", "disruption_budget", "monitoring"))


class NetworkPolicy(SpecModel):
    """Who may reach replicas, and whom they may reach."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    enabled: bool = True
    """Whether replicas and evaluations are closed to all but this service's gateway, the operator and, with
    monitoring, Prometheus, and reach only what the model's sources need. Policies of your own add to it.
    Default true."""


class DisruptionBudget(SpecModel):
    """How many replicas an eviction, such as a node's drain, may take at a time."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    enabled: bool = True
    """Whether there is a PodDisruptionBudget while more than one replica is wanted; of a single one it would
    only hold up drains. Default true."""
    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Replicas that may be unavailable because of evictions (1 to 1000). Default 1."""


class Monitoring(SpecModel):
    """What is made for the Prometheus operator, where the cluster has its kinds."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    enabled: bool = True
    """Whether there are a PodMonitor for the replicas and the gateway and a PrometheusRule with alerts on the
    promises; without those kinds in the cluster neither is made. Default true."""
    scrape_interval_seconds: Annotated[int, Field(ge=5, le=300)] = 15
    """Seconds between two scrapes of each pod (5 to 300). Default 15."""
    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=16)
    """Labels of the PodMonitor and the PrometheusRule by which a Prometheus selects them, such as `release`,
    at most 16. They add to those that the administrator gave the operator (`monitoring.labels` of the
    chart), and win over them; those of Headway's own are not for them. Default: none."""

    @field_validator("labels")
    @classmethod
    def _have_keys_of_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        """Here and not in the CRD, whose schema has no words for the keys of a map."""
        for key in labels:
            if re.fullmatch(LABEL_KEY_PATTERN, key) is None:
                raise ValueError(
                    f"{key!r} is not a label's key; write NAME or PREFIX/NAME, PREFIX a DNS name and "
                    "NAME at most 63 letters, digits, '-', '_' and '.', a letter or digit first and last"
                )
            if key in names.service_labels(""):
                raise ValueError(f"{key!r} is set by Headway; remove it, or take another key")
        return labels

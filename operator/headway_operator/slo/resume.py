"""The memory of an operator that starts again: a checkpoint, corrected by what stands in the world."""

from collections.abc import Mapping
from typing import Any

from headway_operator.samples import Sample
from headway_operator.slo.evidence import applied_limits
from headway_operator.slo.memory import Memory


def resume(checkpoint: Mapping[str, Any] | None, sample: Sample, now: float) -> Memory:
    """The memory in `checkpoint`; a fresh one for None. Raises as `Memory.from_dict` does.

    A checkpoint may be older than the last decision. What was asked for last is what the cluster has been
    told and what the replicas run with; to believe the checkpoint instead would undo that decision.
    """
    memory = Memory.from_dict(checkpoint, now)
    return memory._replace(replicas=None, limits=applied_limits(sample) or memory.limits)

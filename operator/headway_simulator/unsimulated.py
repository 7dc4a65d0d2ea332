"""Which fields of a manifest a simulation passes over, so that the report can say so. Simulates nothing.

A field counts where its value is another than the default. What is in neither table is simulated, or changes
nothing that a simulation tells of: names, keys, monitoring, where pods may run.
"""

from dataclasses import dataclass
from typing import Any

from headway_operator.spec import InferenceServiceSpec

# What could change the outcome, and is not simulated by either command.
NOWHERE = (
    "slo.endToEndMilliseconds",
    "kvOffload",
    "lora",
    "quality",
    "rollout",
    "gateway",
    "template",
)
# What a step model stands for. A plan takes it from a manifest, but for what it has no flag for.
IN_STEP_MODEL = (
    *("dtype", "quantization", "weightCompression", "tensorParallelSize", "nodesPerReplica"),
    *("kvCacheDtype", "device", "gpu", "speculative.draft"),
)
CACHE_SIZE = "kvCacheMemory"


@dataclass(frozen=True, slots=True)
class Unsimulated:
    """Fields of a manifest: that are not simulated, and instead of which the step model's numbers count."""

    passed_over: tuple[str, ...] = ()
    told_by_step_model: tuple[str, ...] = ()


def unsimulated(spec: InferenceServiceSpec) -> Unsimulated:
    """What of a manifest does not count in a simulation."""
    return Unsimulated(tuple(_given(spec, NOWHERE)), tuple(_given(spec, (*IN_STEP_MODEL, CACHE_SIZE))))


def passed_over_by_plan(spec: InferenceServiceSpec) -> list[str]:
    """Fields that a plan over a load does not simulate: its arithmetic says how large the cache is."""
    return _given(spec, (*NOWHERE, CACHE_SIZE))


def _given(spec: InferenceServiceSpec, fields: tuple[str, ...]) -> list[str]:
    told: dict[str, Any] = spec.model_dump(by_alias=True, exclude_defaults=True)
    found = []
    for field in fields:
        part: Any = told
        for name in field.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        if part is not None:
            found.append(field)
    return found

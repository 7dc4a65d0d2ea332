"""One condition and how it follows on its predecessor."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headway_operator.times import timestamp

Status = Literal["True", "False", "Unknown"]
MAX_MESSAGE_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Condition:
    """A fact, its stable CamelCase reason, and one sentence."""

    type: str
    status: Status
    reason: str
    message: str


def written(
    conditions: Iterable[Condition], previous: Iterable[Mapping[str, Any]], generation: int, now: float
) -> list[dict[str, Any]]:
    """The conditions as status holds them; `lastTransitionTime` moves only where `status` flipped."""
    before = {condition["type"]: condition for condition in previous}
    result = []
    for condition in conditions:
        old = before.get(condition.type, {})
        is_same = old.get("status") == condition.status
        result.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message[:MAX_MESSAGE_LENGTH],
                "lastTransitionTime": old["lastTransitionTime"] if is_same else timestamp(now),
                "observedGeneration": generation,
            }
        )
    return result

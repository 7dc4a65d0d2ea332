"""The steps of a pass that failed, as the condition Degraded tells them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problems:
    """messages: of each step that failed, in order. reason: of the first one."""

    messages: tuple[str, ...] = ()
    reason: str = "StepFailed"


NO_PROBLEMS = Problems()

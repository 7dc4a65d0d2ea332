"""What conditions say of a service that names a ModelCache which has nothing to serve."""

from dataclasses import dataclass

from headway_operator.conditions.condition import Condition
from headway_operator.plan import wanted_replicas
from headway_operator.spec import Service
from headway_operator.state import Decision, Observed, Rendered


@dataclass(frozen=True, slots=True)
class Lack:
    """Why nothing of what the spec asks for can be started. is_stuck: until somebody does something."""

    reason: str
    message: str
    is_stuck: bool


def ready(
    service: Service, observed: Observed, decision: Decision, rendered: Rendered, lack: Lack | None
) -> Condition | None:
    """Ready while nothing runs for want of the model; None while something does, or nothing is wanted."""
    is_idle = observed.replicas or not wanted_replicas(service, decision)
    if lack is None or not rendered.serves_nothing or is_idle:
        return None
    message = f"no replica starts before its model is there: {lack.message}"
    return Condition("Ready", "False", lack.reason, message)


def progressing(rendered: Rendered, lack: Lack | None) -> Condition | None:
    """Progressing while what the spec asks for is held back."""
    if lack is None:
        return None
    serving = "" if rendered.serves_nothing else f"; revision {rendered.revision.name} serves on"
    message = f"what the spec asks for waits for its model: {lack.message}{serving}"
    return Condition("Progressing", "False" if lack.is_stuck else "True", lack.reason, message)


def model_available(lack: Lack | None) -> Condition | None:
    """Whether the model that the spec asks for can be had, whatever older one serves."""
    return None if lack is None else Condition("ModelAvailable", "False", lack.reason, lack.message)


def degraded(lack: Lack | None) -> Condition | None:
    """Degraded where waiting will not help."""
    if lack is None or not lack.is_stuck:
        return None
    return Condition("Degraded", "True", lack.reason, lack.message)

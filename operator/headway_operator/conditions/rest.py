"""What conditions say of a service without replicas on purpose: suspended, or asleep until somebody asks."""

from headway_operator.conditions.condition import Condition
from headway_operator.spec import Service
from headway_operator.state import Decision, Observed

SUSPENDED = "Suspended"
ASLEEP = "Asleep"


def ready(service: Service, observed: Observed, decision: Decision) -> Condition | None:
    """Ready of a service at rest; None for one that is not, or whose gateway could not hold a request."""
    if service.spec.suspend:
        message = "spec.suspend is true, so that requests are refused; set it to false to serve again"
        return Condition("Ready", "False", SUSPENDED, message)
    if not is_asleep(decision) or not observed.gateway.ready:
        return None
    message = f"no replica is needed; the first request at {observed.url or 'the gateway'} starts one"
    return Condition("Ready", "True", ASLEEP, message)


def progressing(service: Service, observed: Observed, decision: Decision) -> Condition | None:
    """Progressing of a service at rest."""
    if not service.spec.suspend and not is_asleep(decision):
        return None
    reason = SUSPENDED if service.spec.suspend else ASLEEP
    if observed.replicas:
        message = f"{len(observed.replicas)} replicas still finish what they have in hand"
        return Condition("Progressing", "True", "RemovingReplicas", message)
    return Condition("Progressing", "False", reason, "no replica is wanted, and none remains")


def is_asleep(decision: Decision) -> bool:
    """Whether the service has no replicas because nobody asks for anything."""
    return decision.cause in ("Idle", ASLEEP)

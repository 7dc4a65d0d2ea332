"""Which conditions hold, and why: one function per condition. Those about the promise are `slo_rules`'.

Ready           the gateway and enough replicas serve, and none crashes
Progressing     something is on its way: a rollout, more or fewer replicas
ModelAvailable  whether a replica has the model loaded
Degraded        something is wrong although requests may still be served
QualityVerified whether the model was judged, and passed; said of a service that asks for it

What each reason means and what to do about it stands in `docs/conditions.md`.
"""

from headway_operator.conditions.causes import (
    cause_of,
    crashing,
    gateway_is_in_trouble,
    gateway_words,
    in_trouble,
    recent_losses,
)
from headway_operator.conditions.condition import Condition
from headway_operator.conditions.problems import NO_PROBLEMS, Problems
from headway_operator.manifests.model_source import has_to_be_fetched
from headway_operator.plan import wanted_replicas
from headway_operator.quality import Gate
from headway_operator.spec import Service
from headway_operator.state import Decision, Observed, Rendered, is_crashing


def ready(
    service: Service, observed: Observed, decision: Decision, rendered: Rendered, gate: Gate | None
) -> Condition:
    """Ready, or the real cause why not."""
    wanted = wanted_replicas(service, decision)
    floor = wanted if service.spec.replicas is not None else min(wanted, service.spec.scaling.min_replicas)
    num_ready = sum(replica.phase == "ready" for replica in observed.replicas)
    if failing := crashing(observed):
        reason, message = cause_of(failing)
        message = f"{len(failing)} of {len(observed.replicas)} replicas cannot run: {message}"
        return Condition("Ready", "False", reason, message)
    if wanted == 0:
        return Condition("Ready", "False", "ScaledToZero", "spec.replicas is 0; raise it to serve")
    if gate is not None and rendered.serves_nothing and not observed.replicas:
        message = f"no replica starts before revision {rendered.withheld} is verified: {gate.message}"
        return Condition("Ready", "False", reason_of(gate), message)
    if num_ready < floor or num_ready == 0:
        waiting = [replica for replica in observed.replicas if replica.phase != "ready"]
        reason, message = cause_of(waiting, recent_losses(observed, decision.at))
        return Condition("Ready", "False", reason, f"{num_ready} of {wanted} replicas ready: {message}")
    if not observed.gateway.ready:
        reason = observed.gateway.reason or "GatewayNotReady"
        return Condition("Ready", "False", reason, gateway_words(observed.gateway))
    where = f" at {observed.url}" if observed.url else ""
    return Condition("Ready", "True", "Serving", f"{num_ready} of {wanted} replicas ready{where}")


def progressing(
    service: Service, rendered: Rendered, observed: Observed, decision: Decision, gate: Gate | None
) -> Condition:
    """Whether something is still moving towards what is wanted."""
    wanted = wanted_replicas(service, decision)
    current = [replica for replica in observed.replicas if replica.revision == rendered.revision.hash]
    others = len(observed.replicas) - len(current)
    num_ready = sum(replica.phase == "ready" for replica in current)
    failing = [replica for replica in current if is_crashing(replica)]
    name = rendered.revision.name
    if failing:
        reason, message = cause_of(failing)
        return Condition("Progressing", "False", reason, f"revision {name} does not come up: {message}")
    if gate is not None and rendered.withheld:
        serving = "" if rendered.serves_nothing else f"; revision {name} serves on"
        message = f"revision {rendered.withheld} is withheld: {gate.message}{serving}"
        return Condition("Progressing", "True" if gate.is_under_way else "False", reason_of(gate), message)
    if others:
        message = f"revision {name} has {num_ready} of {wanted} replicas ready; {others} of older ones remain"
        return Condition("Progressing", "True", "RollingOut", message)
    if num_ready < wanted:
        waiting = [replica for replica in current if replica.reason and replica.phase != "ready"]
        cause = ": ".join(("", *cause_of(waiting))) if waiting else ""
        message = f"{num_ready} of {wanted} replicas ready{cause}"
        return Condition("Progressing", "True", "AddingReplicas", message)
    if len(current) > wanted:
        message = f"{len(current)} replicas exist, {wanted} are wanted"
        return Condition("Progressing", "True", "RemovingReplicas", message)
    return Condition("Progressing", "False", "Settled", f"revision {name} has all {wanted} replicas")


def model_available(service: Service, observed: Observed, decision: Decision) -> Condition:
    """Whether a replica has loaded the model; while none has, how far the first one is."""
    if any(replica.phase == "ready" for replica in observed.replicas):
        return Condition("ModelAvailable", "True", "Loaded", "a replica has the model loaded")
    if failing := crashing(observed):
        return Condition("ModelAvailable", "False", *cause_of(failing))
    living = [replica for replica in observed.replicas if replica.phase != "draining"]
    if not living and wanted_replicas(service, decision) == 0:
        return Condition("ModelAvailable", "Unknown", "ScaledToZero", "no replica is wanted")
    if any(replica.phase == "starting" for replica in living) and not any(one.reason for one in living):
        if has_to_be_fetched(service.spec):
            # Without an address it does not listen yet: what it says is of what it fetches.
            told = next(
                (f"{one.name}: {one.message}" for one in living if one.message and not one.address), ""
            )
            message = told or f"a replica fetches {service.spec.model.source} or loads it"
            return Condition("ModelAvailable", "Unknown", "Fetching", message)
        return Condition(
            "ModelAvailable", "Unknown", "Loading", f"a replica loads {service.spec.model.source}"
        )
    return Condition("ModelAvailable", "Unknown", *cause_of(living, recent_losses(observed, decision.at)))


def quality_verified(gate: Gate) -> Condition:
    """The verdict with its numbers, or why there is none."""
    return Condition("QualityVerified", gate.status, gate.reason, gate.message)


def degraded(
    observed: Observed, decision: Decision, gate: Gate | None, problems: Problems = NO_PROBLEMS
) -> Condition:
    """Whether something is wrong, whatever still serves. problems: steps of this pass that failed."""
    if problems.messages:
        others = len(problems.messages) - 1
        more = f" (and {others} more)" if others else ""
        message = f"{problems.messages[0]}{more}; it is tried again"
        return Condition("Degraded", "True", problems.reason, message)
    if failing := crashing(observed):
        reason, message = cause_of(failing)
        return Condition("Degraded", "True", reason, f"{len(failing)} replicas cannot run: {message}")
    if gateway_is_in_trouble(observed.gateway, decision.at):
        return Condition("Degraded", "True", observed.gateway.reason, gateway_words(observed.gateway))
    if gate is not None and gate.is_stuck:
        return Condition("Degraded", "True", reason_of(gate), gate.message)
    if waiting := in_trouble(observed, decision.at):
        reason, message = cause_of(waiting)
        return Condition("Degraded", "True", reason, f"{len(waiting)} replicas wait: {message}")
    if losses := recent_losses(observed, decision.at):
        lost = f"{len(losses)} replicas lost: {losses[0].name}: {losses[0].message}"
        return Condition("Degraded", "True", losses[0].reason, lost)
    if decision.sick:
        return Condition("Degraded", "True", "SickReplica", decision.sick)
    if decision.blocker == "SamplesMissing":
        return Condition("Degraded", "True", "SamplesMissing", decision.message)
    return Condition("Degraded", "False", "AsExpected", "nothing is wrong")


def reason_of(gate: Gate) -> str:
    """The gate's reason among those of other conditions."""
    return "VerifyingQuality" if gate.is_under_way else f"Quality{gate.reason}"

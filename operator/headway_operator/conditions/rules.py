"""Which conditions hold, and why: one function per condition.

Ready           the gateway and enough replicas serve, and none crashes
Progressing     something is on its way: a rollout, more or fewer replicas
SLOMet          what the evidence says about both targets
ScalingActive   whether the controller may move replicas
ModelAvailable  whether a replica has the model loaded; said once it is known
Degraded        something is wrong although requests may still be served
QualityVerified whether the model was judged, and passed; said of a service that asks for it
"""

from collections import Counter
from collections.abc import Sequence

from headway_operator.conditions.condition import Condition
from headway_operator.plan import wanted_replicas
from headway_operator.quality import Gate
from headway_operator.spec import Service
from headway_operator.state import Attainment, Decision, Observed, Rendered, Replica

# Blockers that keep the controller from moving replicas at all; others only limit it.
INACTIVE_BLOCKERS = ("FixedReplicas", "OtherScaler", "SamplesMissing")


def ready(
    service: Service, observed: Observed, decision: Decision, rendered: Rendered, gate: Gate | None
) -> Condition:
    """Ready, or the real cause why not."""
    wanted = wanted_replicas(service, decision)
    floor = wanted if service.spec.replicas is not None else min(wanted, service.spec.scaling.min_replicas)
    num_ready = sum(replica.phase == "ready" for replica in observed.replicas)
    crashing = [replica for replica in observed.replicas if is_crashing(replica)]
    if crashing:
        reason, message = cause_of(crashing)
        message = f"{len(crashing)} of {len(observed.replicas)} replicas crash: {message}"
        return Condition("Ready", "False", reason, message)
    if wanted == 0:
        return Condition("Ready", "False", "ScaledToZero", "spec.replicas is 0; raise it to serve")
    if gate is not None and rendered.serves_nothing and not observed.replicas:
        message = f"no replica starts before revision {rendered.withheld} is verified: {gate.message}"
        return Condition("Ready", "False", reason_of(gate), message)
    if num_ready < floor or num_ready == 0:
        waiting = [replica for replica in observed.replicas if replica.phase != "ready"]
        reason, message = cause_of(waiting)
        return Condition("Ready", "False", reason, f"{num_ready} of {wanted} replicas ready: {message}")
    if not observed.gateway.ready:
        message = observed.gateway.message or "the gateway is not ready yet"
        return Condition("Ready", "False", observed.gateway.reason or "GatewayNotReady", message)
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
        message = f"{num_ready} of {wanted} replicas ready"
        return Condition("Progressing", "True", "AddingReplicas", message)
    if len(current) > wanted:
        message = f"{len(current)} replicas exist, {wanted} are wanted"
        return Condition("Progressing", "True", "RemovingReplicas", message)
    return Condition("Progressing", "False", "Settled", f"revision {name} has all {wanted} replicas")


def slo_met(decision: Decision) -> Condition:
    """What 90% confidence allows to say about the targets."""
    judged = {"TTFT": decision.ttft, "TPOT": decision.tpot}
    promised = {name: a for name, a in judged.items() if a.target_milliseconds is not None}
    if not promised:
        return Condition("SLOMet", "Unknown", "NoTarget", "spec.slo sets no target")
    texts = "; ".join(_attainment_text(name, attainment) for name, attainment in promised.items())
    violated = [name for name, attainment in promised.items() if attainment.verdict == "violated"]
    if violated:
        return Condition("SLOMet", "False", f"{'And'.join(violated)}Violated", texts)
    if all(attainment.verdict == "met" for attainment in promised.values()):
        return Condition("SLOMet", "True", "TargetsMet", texts)
    num_requests = sum(attainment.met + attainment.missed for attainment in promised.values())
    reason = "NotEnoughRequests" if num_requests else "NoTraffic"
    return Condition("SLOMet", "Unknown", reason, texts)


def scaling_active(decision: Decision) -> Condition:
    """Whether the controller may move replicas, and what limits it."""
    if decision.blocker in INACTIVE_BLOCKERS:
        return Condition("ScalingActive", "False", decision.blocker, decision.message)
    return Condition("ScalingActive", "True", decision.blocker or "Measuring", decision.message)


def model_available(observed: Observed) -> Condition | None:
    """Known once a replica has loaded the model, or ended before any had it."""
    if any(replica.phase == "ready" for replica in observed.replicas):
        return Condition("ModelAvailable", "True", "Loaded", "a replica has the model loaded")
    failing = [replica for replica in observed.replicas if is_crashing(replica)]
    if failing:
        return Condition("ModelAvailable", "False", *cause_of(failing))
    return None


def quality_verified(gate: Gate) -> Condition:
    """The verdict with its numbers, or why there is none."""
    return Condition("QualityVerified", gate.status, gate.reason, gate.message)


def degraded(
    observed: Observed, decision: Decision, gate: Gate | None, problems: Sequence[str] = ()
) -> Condition:
    """Whether something is wrong, whatever still serves. problems: steps of this pass that failed."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Condition("Degraded", "True", "StepFailed", f"{problems[0]}{more}; it is tried again")
    failing = [replica for replica in observed.replicas if is_crashing(replica)]
    if failing:
        reason, message = cause_of(failing)
        return Condition("Degraded", "True", reason, f"{len(failing)} replicas crash: {message}")
    if gate is not None and gate.is_stuck:
        return Condition("Degraded", "True", reason_of(gate), gate.message)
    if decision.blocker == "SamplesMissing":
        return Condition("Degraded", "True", "SamplesMissing", decision.message)
    return Condition("Degraded", "False", "AsExpected", "nothing is wrong")


def reason_of(gate: Gate) -> str:
    """The gate's reason among those of other conditions."""
    return "VerifyingQuality" if gate.is_under_way else f"Quality{gate.reason}"


def is_crashing(replica: Replica) -> bool:
    """Failed, or starting once more after a failure."""
    return replica.phase == "failed" or (replica.phase == "starting" and replica.num_restarts > 0)


def cause_of(replicas: list[Replica]) -> tuple[str, str]:
    """The commonest reason of those replicas with one replica's words for it."""
    named = [replica for replica in replicas if replica.reason]
    if not named:
        phases = Counter(replica.phase for replica in replicas)
        if not phases:
            return "NoReplicas", "no replica exists yet"
        return "ReplicasStarting", ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    reason, _ = Counter(replica.reason for replica in named).most_common(1)[0]
    example = next(replica for replica in named if replica.reason == reason)
    return reason, f"{example.name}: {example.message or reason}"


def _attainment_text(name: str, attainment: Attainment) -> str:
    num_requests = attainment.met + attainment.missed
    target = f"target {attainment.target_milliseconds:g} ms"
    if not num_requests:
        return f"{name}: no request judged against {target}"
    return f"{name}: {attainment.met} of {num_requests} requests within {target}"

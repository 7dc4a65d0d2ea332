"""What may be said of the promise: whether it is kept, whether it can be, whether replicas may move for it.

SLOMet          what the evidence says about the targets
SLOFeasible     whether replicas of this kind can keep the targets at all, as far as was seen
ScalingActive   whether the controller may move replicas
"""

from collections.abc import Mapping
from typing import Any

from headway_operator.conditions.condition import Condition
from headway_operator.state import Attainment, Decision

# Blockers that keep the controller from moving replicas at all; others only limit it.
INACTIVE_BLOCKERS = ("FixedReplicas", "OtherScaler", "SamplesMissing", "Suspended")
INFEASIBLE = "TargetInfeasible"


def slo_met(decision: Decision) -> Condition:
    """What 90% confidence allows to say about the targets."""
    promised = _promised(decision)
    if not promised:
        return Condition("SLOMet", "Unknown", "NoTarget", "spec.slo sets no target")
    texts = _texts(promised)
    violated = [name for name, attainment in promised.items() if attainment.verdict == "violated"]
    if violated:
        return Condition("SLOMet", "False", f"{'And'.join(violated)}Violated", texts)
    if _is_met(promised):
        return Condition("SLOMet", "True", "TargetsMet", texts)
    num_requests = sum(attainment.met + attainment.missed for attainment in promised.values())
    reason = "NotEnoughRequests" if num_requests else "NoTraffic"
    return Condition("SLOMet", "Unknown", reason, texts)


def slo_feasible(decision: Decision, previous: Mapping[str, Any], generation: int) -> Condition:
    """Whether the targets can be kept. previous: this condition as status has it, or empty.

    Two things are known: that targets which are met can be met, and that replicas with next to nothing to do
    which miss the TTFT target would miss it in any number. Either stands until the other is seen or the spec
    changes: a service without load shows neither.
    """
    promised = _promised(decision)
    if not promised:
        return Condition("SLOFeasible", "Unknown", "NoTarget", "spec.slo sets no target")
    # Where nobody may move replicas, that is the blocker; and advice is of what came since the last change.
    if decision.blocker == INFEASIBLE or (decision.advice and not _is_met(promised)):
        return Condition("SLOFeasible", "False", INFEASIBLE, decision.advice or decision.message)
    if _is_met(promised):
        return Condition("SLOFeasible", "True", "TargetsMet", _texts(promised))
    if previous.get("status") in ("True", "False") and previous.get("observedGeneration") == generation:
        return Condition("SLOFeasible", previous["status"], previous["reason"], previous["message"])
    message = "not seen yet: requests have neither met the targets nor missed them on an idle replica"
    return Condition("SLOFeasible", "Unknown", "NotProven", message)


def scaling_active(decision: Decision) -> Condition:
    """Whether the controller may move replicas, and what limits it."""
    if decision.blocker in INACTIVE_BLOCKERS:
        return Condition("ScalingActive", "False", decision.blocker, decision.message)
    return Condition("ScalingActive", "True", decision.blocker or "Measuring", decision.message)


def _promised(decision: Decision) -> dict[str, Attainment]:
    judged = {"TTFT": decision.ttft, "TPOT": decision.tpot, "EndToEnd": decision.end_to_end}
    return {name: one for name, one in judged.items() if one.target_milliseconds is not None}


def _is_met(promised: Mapping[str, Attainment]) -> bool:
    return all(attainment.verdict == "met" for attainment in promised.values())


def _texts(promised: Mapping[str, Attainment]) -> str:
    return "; ".join(_text(name, attainment) for name, attainment in promised.items())


def _text(name: str, attainment: Attainment) -> str:
    num_requests = attainment.met + attainment.missed
    target = f"target {attainment.target_milliseconds:g} ms"
    if not num_requests:
        return f"{name}: no request judged against {target}"
    return f"{name}: {attainment.met} of {num_requests} requests within {target}"

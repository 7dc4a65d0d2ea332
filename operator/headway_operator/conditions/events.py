"""What is worth an event: a condition that flipped or changed its cause, a decision that changed something.

Every event goes with a status that `worth_writing` lets through, so that none is told twice.
"""

from collections.abc import Mapping
from typing import Any, Literal

Event = tuple[Literal["Normal", "Warning"], str, str]

# Conditions that are worth an event, with the status that is bad news.
_BAD_NEWS = {
    "Ready": "False",
    "SLOMet": "False",
    "SLOFeasible": "False",
    "ScalingActive": "False",
    "QualityVerified": "False",
    "Degraded": "True",
}
# Not ready for an everyday cause.
_EVERYDAY = (
    *("ReplicasStarting", "NoReplicas", "GatewayNotReady", "ScaledToZero", "FixedReplicas"),
    *("VerifyingQuality", "ModelCacheFetching"),
    "Suspended",
)
# Worth an event although it is neither good nor bad news yet.
_BEGINNINGS = ("Verifying", "FileMissing", "VerdictLost")


def events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """(kind, reason, message) of what happened between two statuses."""
    return (
        _condition_events(previous, new)
        + _revision_events(previous, new)
        + _rollout_events(previous, new)
        + _decision_events(previous, new)
        + _recommendation_events(previous, new)
    )


def _condition_events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    before = {condition["type"]: condition for condition in previous.get("conditions") or []}
    result: list[Event] = []
    for condition in new.get("conditions") or []:
        name, state, reason = condition["type"], condition["status"], condition["reason"]
        old = before.get(name, {})
        is_news = old.get("status") != state or (state == _BAD_NEWS.get(name) and old.get("reason") != reason)
        # The absence of trouble is no news unless there was trouble.
        is_first_good = not old and state != _BAD_NEWS.get(name) and name != "Ready"
        # That a promise can be kept is no news to those who see it kept, unless it was denied before.
        is_first_good |= name == "SLOFeasible" and state == "True" and old.get("status") != "False"
        if name == "QualityVerified" and reason in _BEGINNINGS and old.get("reason") != reason:
            result.append(("Normal", reason, f"{name} is {state}: {condition['message']}"))
            continue
        if name not in _BAD_NEWS or not is_news or is_first_good or state == "Unknown":
            continue
        # Degraded and Ready mostly have the same cause; one event tells it.
        if name == "Degraded" and any(told_reason == reason for _, told_reason, _ in result):
            continue
        is_bad = state == _BAD_NEWS[name] and reason not in _EVERYDAY
        result.append(
            ("Warning" if is_bad else "Normal", reason, f"{name} is {state}: {condition['message']}")
        )
    return result


def _revision_events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    old, current = (_served(status) for status in (previous, new))
    if current and current != old:
        seconds = (new.get("revision") or {}).get("drainTimeoutSeconds")
        drain = f"; its pods have {seconds} s to finish their requests" if seconds else ""
        return [("Normal", "RevisionMade", f"revision {current} replaces {old or 'nothing'}{drain}")]
    return []


def _rollout_events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """Steps of a canary, and the end of a rollout; that one was given up is told by Degraded."""
    old, now = (status.get("rollout") or {} for status in (previous, new))
    weight, candidate = now.get("weight"), old.get("candidate")
    if weight and weight != old.get("weight"):
        return [("Normal", "CanaryStep", f"revision {now['candidate']} gets {weight}% of the requests")]
    if candidate and candidate == (now.get("stable") or {}).get("name"):
        return [("Normal", "RolloutComplete", f"revision {candidate} serves alone")]
    return []


def _served(status: Mapping[str, Any]) -> str | None:
    """The revision that status names, unless it is only waited for."""
    name: str | None = (status.get("revision") or {}).get("name")
    return None if name == (status.get("quality") or {}).get("withheld") else name


def _decision_events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    old, decision = (status.get("lastDecision") or {} for status in (previous, new))
    parts = ("replicas", "maxNumSeqs", "maxNumBatchedTokens")
    if not old or not decision or all(old.get(part) == decision.get(part) for part in parts):
        return []
    return [("Normal", decision["cause"], decision["message"])]


def _recommendation_events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """The first of each kind; its numbers move on without another one."""
    advice: str | None = new.get("recommendation")
    if advice and not previous.get("recommendation"):
        return [("Warning", "Recommendation", advice)]
    return []

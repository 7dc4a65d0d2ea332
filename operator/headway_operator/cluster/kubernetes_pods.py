"""Reads pods: which phase a replica is in and, if not ready, the real cause in the words of Kubernetes.

Pure. Pods that have ended for good (evicted, completed) are no replicas: their ReplicaSet has replaced them.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headway_operator.names import DELETION_COST_ANNOTATION, HTTP_PORT, REVISION_LABEL
from headway_operator.state import Gateway, Replica, ReplicaPhase

Pod = Mapping[str, Any]
# A container that waits for one of these does so because something is in order, only not yet.
PATIENT_REASONS = frozenset(("ContainerCreating", "PodInitializing", ""))
MAX_MESSAGE_CHARACTERS = 500


def seconds_of(timestamp: str) -> float:
    """Seconds since the epoch of a Kubernetes timestamp."""
    return datetime.fromisoformat(timestamp).timestamp()


def is_live(pod: Pod) -> bool:
    """Whether the pod still counts: not ended for good."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def replica(pod: Pod) -> Replica:
    """One runtime pod as a replica."""
    metadata = pod["metadata"]
    phase, reason, message = judge(pod)
    ready = _condition(pod, "Ready")
    is_ready = phase == "ready" and ready.get("lastTransitionTime") is not None
    return Replica(
        name=metadata["name"],
        revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
        phase=phase,
        address=address(pod),
        created_at=seconds_of(metadata["creationTimestamp"]),
        ready_at=seconds_of(ready["lastTransitionTime"]) if is_ready else None,
        reason=reason,
        message=message,
        num_restarts=sum(int(status.get("restartCount", 0)) for status in _statuses(pod)),
        deletion_cost=int(metadata.get("annotations", {}).get(DELETION_COST_ANNOTATION, 0)),
    )


def uncreated_replica(deployment: Mapping[str, Any], num_pods: int) -> Replica | None:
    """A failed replica in place of pods that cannot even be created (quota, admission), else None."""
    wanted = int(deployment["spec"].get("replicas", 1))
    failure = _condition(deployment, "ReplicaFailure")
    if num_pods >= wanted or failure.get("status") != "True":
        return None
    metadata = deployment["metadata"]
    return Replica(
        name=f"{metadata['name']}-uncreated",
        revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
        phase="failed",
        address=None,
        created_at=seconds_of(metadata["creationTimestamp"]),
        reason=failure.get("reason", "FailedCreate"),
        message=_one_line(failure.get("message", "")),
    )


def gateway(pods: Iterable[Pod]) -> Gateway:
    """The gateway from its pods: ready when one is, else with the cause of the newest that says one."""
    newest_first = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    judged = [(pod, *judge(pod)) for pod in newest_first]
    ready = [pod for pod, phase, _, _ in judged if phase == "ready"]
    causes = [(reason, message) for _, phase, reason, message in judged if phase != "ready" and reason]
    reason, message = causes[0] if causes else ("", "")
    return Gateway(
        ready=bool(ready),
        addresses=tuple(url for pod in ready if (url := address(pod)) is not None),
        reason=reason,
        message=message,
    )


def address(pod: Pod) -> str | None:
    """Base URL of the pod's server, once it has an address."""
    ip = pod.get("status", {}).get("podIP")
    if not ip:
        return None
    return f"http://[{ip}]:{HTTP_PORT}" if ":" in ip else f"http://{ip}:{HTTP_PORT}"


def judge(pod: Pod) -> tuple[ReplicaPhase, str, str]:
    """Phase, reason and message; reason is "" while all goes as it should."""
    if pod["metadata"].get("deletionTimestamp"):
        return "draining", "", ""
    if _condition(pod, "Ready").get("status") == "True":
        return "ready", "", ""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        reason = scheduled.get("reason", "Unschedulable")
        return "pending", reason, _one_line(scheduled.get("message", ""))
    statuses = _statuses(pod)
    for status in statuses:
        state = status.get("state", {})
        waiting = state.get("waiting", {})
        if "terminated" in state and state["terminated"].get("exitCode", 0) != 0:
            return "failed", *_ended(state["terminated"])
        if waiting.get("reason", "") not in PATIENT_REASONS:
            last = status.get("lastState", {}).get("terminated")
            if waiting["reason"] == "CrashLoopBackOff" and last:
                return "failed", *_ended(last)
            return "failed", waiting["reason"], _one_line(waiting.get("message", ""))
    if not statuses or any("running" not in status.get("state", {}) for status in statuses[-1:]):
        return "pending", "", ""
    for status in statuses:
        last = status.get("lastState", {}).get("terminated")
        if last and last.get("exitCode", 0) != 0:  # it runs again, but what ended it may end it once more
            return "starting", *_ended(last)
    return "starting", "", ""


def _ended(terminated: Mapping[str, Any]) -> tuple[str, str]:
    exit_code = int(terminated.get("exitCode", 0))
    reason = "OOMKilled" if terminated.get("reason") == "OOMKilled" else "CrashLoopBackOff"
    cause = "killed because memory ran out" if reason == "OOMKilled" else f"exited with status {exit_code}"
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    return reason, _one_line(f"{cause}; last line: {lines[-1]}" if lines else cause)


def _statuses(pod: Pod) -> Sequence[Mapping[str, Any]]:
    """Init containers first: what they wait for, the others wait for too."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _condition(thing: Mapping[str, Any], condition_type: str) -> Mapping[str, Any]:
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == condition_type), {})


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE_CHARACTERS]

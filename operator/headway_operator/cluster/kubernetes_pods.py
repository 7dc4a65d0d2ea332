"""Reads pods: which phase a replica is in and, if not ready, the real cause.

Pure. Pods that have ended for good (evicted, completed) are no replicas: their ReplicaSet has replaced them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from headway_operator.cluster import kubernetes_causes as causes
from headway_operator.cluster import kubernetes_preparation as preparation
from headway_operator.cluster.kubernetes_causes import (
    Pod,
    condition,
    container_statuses,
    one_line,
    seconds_of,
)
from headway_operator.cluster.kubernetes_start import start
from headway_operator.names import DELETION_COST_ANNOTATION, HTTP_PORT, REVISION_LABEL, RUNTIME_CONTAINER
from headway_operator.state import Gateway, Replica, ReplicaPhase

Events = Iterable[Mapping[str, Any]]


def is_live(pod: Pod) -> bool:
    """Whether the pod still counts: not ended for good."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def needs_events(pod: Pod, now: float) -> bool:
    """Whether only the pod's events tell what keeps it."""
    return causes.needs_events(pod) or preparation.takes_long(pod, now)


def replica(pod: Pod, events: Events = ()) -> Replica:
    """One runtime pod as a replica. events: of this pod, where `needs_events` asks for them."""
    metadata = pod["metadata"]
    phase, reason, message = judge(pod, events)
    ready = condition(pod, "Ready")
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
        num_restarts=num_restarts(pod),
        deletion_cost=int(metadata.get("annotations", {}).get(DELETION_COST_ANNOTATION, 0)),
        start=start(pod),
    )


def num_restarts(pod: Pod) -> int:
    """Of the server's container alone: an init container may try again, a sidecar come and go."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return sum(int(one.get("restartCount", 0)) for one in statuses if one.get("name") == RUNTIME_CONTAINER)


def uncreated_replica(deployment: Mapping[str, Any], num_pods: int) -> Replica | None:
    """A failed replica in place of pods that cannot even be created (quota, admission), else None."""
    reason, message = uncreated(deployment, num_pods)
    if not reason:
        return None
    metadata = deployment["metadata"]
    return Replica(
        name=f"{metadata['name']}-uncreated",
        revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
        phase="failed",
        address=None,
        created_at=seconds_of(metadata["creationTimestamp"]),
        reason=reason,
        message=message,
    )


def uncreated(deployment: Mapping[str, Any], num_pods: int) -> causes.Cause:
    """Why some of the pods that a Deployment is to have cannot even be made, while they are missing."""
    wanted = int(deployment["spec"].get("replicas", 1))
    failure = condition(deployment, "ReplicaFailure")
    if num_pods >= wanted or failure.get("status") != "True":
        return causes.NO_CAUSE
    message = one_line(failure.get("message", ""))
    return causes.uncreated(message), message


def gateway(
    pods: Iterable[Pod],
    deployment: Mapping[str, Any] | None = None,
    events: Mapping[str, Events] | None = None,
) -> Gateway:
    """The gateway from its pods: ready when one is, with the cause of the newest of the others that says one.

    deployment: the gateway's own, which says why pods of its latest template cannot be made. events: by the
    uid of their pod.
    """
    newest_first = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    judged = [(pod, *judge(pod, events_of(pod, events or {}))) for pod in newest_first]
    ready = [pod for pod, phase, _, _ in judged if phase == "ready"]
    made = Gateway(
        ready=bool(ready),
        addresses=tuple(url for pod in ready if (url := address(pod)) is not None),
        replicas=None if deployment is None else int(deployment["spec"].get("replicas", 1)),
    )
    for pod, phase, reason, message in judged:
        if reason:
            since = seconds_of(pod["metadata"]["creationTimestamp"]) if phase == "pending" else None
            return replace(made, reason=reason, message=message, waits_since=since)
    if deployment is None:
        return made
    # An older template's pods serve on while those of the latest are refused.
    reason, message = uncreated(deployment, int((deployment.get("status") or {}).get("updatedReplicas", 0)))
    return replace(made, reason=reason, message=message)


def events_of(pod: Pod, events: Mapping[str, Events]) -> Events:
    """Those of this pod."""
    return events.get(pod["metadata"].get("uid", ""), ())


def address(pod: Pod) -> str | None:
    """Base URL of the pod's server, once it has an address."""
    ip = pod.get("status", {}).get("podIP")
    if not ip:
        return None
    return f"http://[{ip}]:{HTTP_PORT}" if ":" in ip else f"http://{ip}:{HTTP_PORT}"


def judge(pod: Pod, events: Events = ()) -> tuple[ReplicaPhase, str, str]:
    """Phase, reason and message; reason is "" while all goes as it should."""
    if pod["metadata"].get("deletionTimestamp"):
        return "draining", *causes.leaving(pod)
    if condition(pod, "Ready").get("status") == "True":
        return "ready", "", ""
    if (cause := causes.unscheduled(pod)) != causes.NO_CAUSE:
        return "pending", *cause
    statuses = container_statuses(pod)
    for status in statuses:
        if (cause := causes.not_running(pod, status, events)) != causes.NO_CAUSE:
            return "failed", *cause
    if not statuses or "running" not in statuses[-1].get("state", {}):
        return "pending", *preparation.unprepared(pod, events)
    if (cause := causes.lost_readiness(pod, events)) != causes.NO_CAUSE:
        return "failed" if cause[0] == "NodeLost" else "starting", *cause
    for status in statuses:
        last = status.get("lastState", {}).get("terminated")
        if last and not status.get("ready"):  # it runs again, but what ended it may end it once more
            return "starting", *causes.ended(pod, status, last, events)
    return "starting", "", ""

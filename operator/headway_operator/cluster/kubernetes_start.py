"""Reads a pod's first start: when it had a node, when its container began, when it was ready. Pure.

Kubernetes writes these times in whole seconds. What the container did between its beginning and being ready,
only it can tell.
"""

from collections.abc import Mapping
from typing import Any

from headway_operator.cluster.kubernetes_causes import Pod, condition, container_statuses, seconds_of
from headway_operator.names import RUNTIME_CONTAINER
from headway_operator.state import Start


def start(pod: Pod) -> Start | None:
    """The start of a ready pod; None for one that is not, or of which a container was restarted."""
    status, ready, scheduled = pod.get("status", {}), condition(pod, "Ready"), condition(pod, "PodScheduled")
    if ready.get("status") != "True" or any(one.get("restartCount") for one in container_statuses(pod)):
        return None
    runtime: Mapping[str, Any] = next(
        (one for one in status.get("containerStatuses") or () if one.get("name") == RUNTIME_CONTAINER), {}
    )
    began = runtime.get("state", {}).get("running", {}).get("startedAt")
    times = (scheduled.get("lastTransitionTime"), began, ready.get("lastTransitionTime"))
    if not all(times):
        return None
    created_at = seconds_of(pod["metadata"]["creationTimestamp"])
    scheduled_at, began_at, ready_at = (seconds_of(str(time)) for time in times)
    initialized = sum(_run_seconds(one) for one in status.get("initContainerStatuses") or ())
    return Start(
        scheduled_seconds=max(0.0, scheduled_at - created_at),
        pulled_seconds=max(0.0, began_at - scheduled_at - initialized),
        initialized_seconds=initialized,
        served_seconds=max(0.0, ready_at - began_at),
    )


def _run_seconds(status: Mapping[str, Any]) -> float:
    """How long an init container ran; one that stays beside the others (a sidecar) took nobody's time."""
    terminated = status.get("state", {}).get("terminated") or {}
    if not terminated.get("startedAt") or not terminated.get("finishedAt"):
        return 0.0
    return max(0.0, seconds_of(terminated["finishedAt"]) - seconds_of(terminated["startedAt"]))

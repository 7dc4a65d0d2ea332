"""What keeps a pod that has a node from beginning: volumes that it does not get, a sandbox that is not made.

Pure. The pod itself says no more than that its containers are about to be created; the cause is in its
events. Those of what it has overcome stay for an hour, so that the latest counts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headway_operator.cluster.kubernetes_causes import (
    NO_CAUSE,
    Cause,
    Pod,
    condition,
    container_statuses,
    in_order,
    one_line,
    seconds_of,
)

# Images are pulled, volumes attached: a pod that has had its node for longer may be asked what it waits for.
PATIENCE_SECONDS = 60.0
# By the word of the kubelet, and of the controller that attaches volumes.
REASONS = {
    "FailedMount": "FailedMount",
    "FailedAttachVolume": "FailedMount",
    "FailedMapVolume": "FailedMount",
    "FailedCreatePodSandBox": "FailedCreatePodSandBox",
}
# What comes after it: what was in the way is so no more.
_GOES_ON = ("SuccessfulAttachVolume", "Pulling", "Pulled", "Created", "Started")
# The kubelet's sum of what it has said before, without the cause.
_SUM = "Unable to attach or mount volumes"


def takes_long(pod: Pod, now: float) -> bool:
    """Whether it has had a node for a while and nothing of it has begun."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "True" or pod["metadata"].get("deletionTimestamp") or _has_begun(pod):
        return False
    since = scheduled.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
    return now - seconds_of(since) >= PATIENCE_SECONDS


def unprepared(pod: Pod, events: Iterable[Mapping[str, Any]]) -> Cause:
    """Why nothing of it has begun; no cause where its events tell none."""
    told = [one for one in in_order(events) if one.get("reason") in (*REASONS, *_GOES_ON)]
    if not told or told[-1]["reason"] in _GOES_ON or _has_begun(pod):
        return NO_CAUSE
    reason = REASONS[told[-1]["reason"]]
    words = [one_line(one.get("message", "")) for one in told if REASONS.get(one["reason"]) == reason]
    return reason, next((one for one in reversed(words) if not one.startswith(_SUM)), words[-1])


def _has_begun(pod: Pod) -> bool:
    """Whether a container of it runs or has run."""
    return any(
        state.keys() & {"running", "terminated"}
        for status in container_statuses(pod)
        for state in (status.get("state") or {}, status.get("lastState") or {})
    )

"""Why a pod does not serve, in one reason of a closed set and one sentence with what a person needs to act.

Pure. Reads what the kubelet, the scheduler and the controllers write into pods and events, and turns their
many words into the reasons of `docs/conditions.md`; what they said themselves stands in the sentence. Which
phase a replica is in is `kubernetes_pods`' business.
"""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headway_operator.errors import is_refused_by_admission
from headway_operator.names import EXIT_STATUS_DOES_NOT_FIT, EXIT_STATUS_FETCH
from headway_operator.state import Loss

Pod = Mapping[str, Any]
Cause = tuple[str, str]
NO_CAUSE: Cause = ("", "")
MAX_MESSAGE_CHARACTERS = 500
# The arithmetic of what does not fit, with the nearest that does at its end.
MAX_FIT_CHARACTERS = 1000
# How a container ends that was asked to: by itself after SIGTERM, by SIGTERM, by SIGKILL.
EXIT_STATUSES_OF_KILLED = frozenset((0, 128 + signal.SIGTERM, 128 + signal.SIGKILL))
# A container that waits for one of these does so because something is in order, only not yet.
PATIENT_REASONS = frozenset(("ContainerCreating", "PodInitializing", ""))
# What else a container waits for, by the kubelet's word for it. It goes to and fro between some of them.
WAITING_REASONS = {
    "ErrImagePull": "ImagePullBackOff",
    "ImagePullBackOff": "ImagePullBackOff",
    "RegistryUnavailable": "ImagePullBackOff",
    "SignatureValidationFailed": "ImagePullBackOff",
    "ImageInspectError": "ImagePullBackOff",
    "ErrImageNeverPull": "ImageNotPresent",
    "InvalidImageName": "InvalidImageName",
    "CreateContainerConfigError": "CreateContainerConfigError",
    "CrashLoopBackOff": "CrashLoopBackOff",
}
OTHER_WAITING_REASON = "CreateContainerError"
# A container that could not even begin ends with one of these.
UNSTARTED_REASONS = frozenset(("StartError", "ContainerCannotRun", "ContainerStatusUnknown"))
# A pod that the kubelet or the system ended for good, by the word in its status; NodeRefused for any other.
LOSS_REASONS = {
    "Evicted": "Evicted",
    "Preempting": "Preempted",
    "NodeLost": "NodeLost",
    "NodeShutdown": "NodeLost",
    "Terminated": "NodeLost",
    "Shutdown": "NodeLost",
}
# The same from the condition that says for what a pod was disrupted.
DISRUPTION_REASONS = {
    "TerminationByKubelet": "Evicted",
    "EvictionByEvictionAPI": "Evicted",
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
}
_INSUFFICIENT = re.compile(r"Insufficient ([\w/-]+(?:\.[\w/-]+)*)")
_KILLED_BY_PROBE = re.compile(r"failed (startup|liveness) probe")


def seconds_of(timestamp: str) -> float:
    """Seconds since the epoch of a Kubernetes timestamp."""
    return datetime.fromisoformat(timestamp).timestamp()


def one_line(text: str, most: int = MAX_MESSAGE_CHARACTERS) -> str:
    """A message without its line breaks, of at most so many characters."""
    return " ".join(text.split())[:most]


def condition(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of that type, or an empty one."""
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})


def container_statuses(pod: Pod) -> Sequence[Mapping[str, Any]]:
    """Init containers first: what they wait for, the others wait for too."""
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def unscheduled(pod: Pod) -> Cause:
    """Why no node has been found for it, with what it asks of the resources that are short."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return NO_CAUSE
    told = one_line(scheduled.get("message", ""))
    if scheduled.get("reason") == "SchedulingGated":
        return "SchedulingGated", told or "a scheduling gate of the pod is not lifted"
    short = dict.fromkeys(_INSUFFICIENT.findall(told))
    wanted = "; ".join(f"not enough {name} on any node, {_asked(pod, name)} asked" for name in short)
    return "Unschedulable", ": ".join(part for part in (wanted, told) if part)


def not_running(pod: Pod, status: Mapping[str, Any], events: Iterable[Mapping[str, Any]] = ()) -> Cause:
    """Why the container of this status does not run, unless it is only about to."""
    state = status.get("state", {})
    if "terminated" in state:
        # An init container that has done its work, or one that will not be started again.
        is_done = state["terminated"].get("exitCode", 0) == 0
        return NO_CAUSE if is_done else ended(pod, status, state["terminated"], events)
    waiting = state.get("waiting")
    if waiting is None or waiting.get("reason", "") in PATIENT_REASONS:
        return NO_CAUSE
    last = status.get("lastState", {}).get("terminated")
    if waiting["reason"] == "CrashLoopBackOff" and last:
        return ended(pod, status, last, events)
    reason = WAITING_REASONS.get(waiting["reason"], OTHER_WAITING_REASON)
    message = one_line(waiting.get("message", ""))
    if waiting["reason"] not in (reason, "ErrImagePull"):
        message = ": ".join(part for part in (waiting["reason"], message) if part)
    return reason, _of(pod, status, message or waiting["reason"])


def ended(
    pod: Pod,
    status: Mapping[str, Any],
    terminated: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]] = (),
) -> Cause:
    """Why a container ended, with the last line that it said."""
    exit_code = int(terminated.get("exitCode", 0))
    name, told = status["name"], str(terminated.get("reason", ""))
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    last_line = f"; last line: {lines[-1]}" if lines else ""
    if told == "OOMKilled":
        limit = _container(pod, name).get("resources", {}).get("limits", {}).get("memory")
        room = f"its memory limit is {limit}" if limit else "it has no memory limit, its node ran out"
        how = f"exit {exit_code}: killed because memory ran out; {room}{last_line}"
        return "OOMKilled", one_line(_of(pod, status, how))
    if told in UNSTARTED_REASONS:
        return OTHER_WAITING_REASON, one_line(_of(pod, status, f"{told}{last_line}"))
    if exit_code == EXIT_STATUS_FETCH:
        return "ModelFetchFailed", one_line(f"the model could not be fetched{last_line}")
    if exit_code == EXIT_STATUS_DOES_NOT_FIT:
        return "DoesNotFit", one_line(f"the memory cannot hold the model{last_line}", MAX_FIT_CHARACTERS)
    if (probe := killed_by_probe(terminated, events)) != NO_CAUSE:
        return probe
    if exit_code > 128 and exit_code - 128 in set(signal.Signals):
        how = f"ended by {signal.Signals(exit_code - 128).name} (exit {exit_code})"
    else:
        how = f"exited with status {exit_code}"
    return "CrashLoopBackOff", one_line(_of(pod, status, f"{how}{last_line}"))


def killed_by_probe(terminated: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> Cause:
    """The probe that had the kubelet kill this container, and what it was answered."""
    if int(terminated.get("exitCode", 0)) not in EXIT_STATUSES_OF_KILLED:
        return NO_CAUSE
    began, over = _span(terminated)
    during = [event for event in in_order(events) if began <= _event_seconds(event) <= over]
    for event in during:
        found = (
            _KILLED_BY_PROBE.search(event.get("message", "")) if event.get("reason") == "Killing" else None
        )
        if found:
            probe = found[1].capitalize()
            answers = [e["message"] for e in during if e.get("message", "").startswith(f"{probe} probe ")]
            return f"{probe}ProbeFailed", one_line(answers[-1] if answers else event["message"])
    return NO_CAUSE


def lost_readiness(pod: Pod, events: Iterable[Mapping[str, Any]] = ()) -> Cause:
    """Why a pod whose containers all run and have started is not ready (any more)."""
    ready = condition(pod, "Ready")
    if ready.get("status") != "False" or ready.get("reason") == "ReadinessGatesNotReady":
        return NO_CAUSE
    if condition(pod, "ContainersReady").get("status") == "True":
        # The kubelet sets both; the node controller withdraws readiness from pods of a node that is silent.
        node = pod.get("spec", {}).get("nodeName", "")
        return "NodeLost", f"node {node} does not report; its pods are replaced unless it comes back"
    unready = [s for s in pod.get("status", {}).get("containerStatuses") or () if not s.get("ready")]
    for status in unready:
        running = status.get("state", {}).get("running")
        if not running or not status.get("started"):
            return NO_CAUSE
        told_of = [e.get("message", "") for e in in_order(events)]
        answers = [message for message in told_of if message.startswith("Readiness probe ")]
        since = ready.get("lastTransitionTime")
        # One that has never been ready is still false since its pod was made.
        was_ready = since is not None and seconds_of(since) > seconds_of(running["startedAt"])
        if was_ready or answers:
            told = answers[-1] if answers else "its readiness probe fails"
            return "ReadinessProbeFailed", one_line(_of(pod, status, told))
    return NO_CAUSE


def needs_events(pod: Pod) -> bool:
    """Whether only the pod's events tell if one of its probes is the cause."""
    if pod["metadata"].get("deletionTimestamp") or condition(pod, "Ready").get("status") == "True":
        return False
    for status in container_statuses(pod):
        last = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
        is_restarted = int(status.get("restartCount", 0)) > 0 or "terminated" in status.get("state", {})
        is_explained = not last or last.get("reason") == "OOMKilled"
        if is_restarted and not is_explained and int(last.get("exitCode", 0)) in EXIT_STATUSES_OF_KILLED:
            return True
        if status.get("started") and not status.get("ready") and "running" in status.get("state", {}):
            return True
    return False


def loss(pod: Pod) -> Loss | None:
    """How a pod was lost that ended for good without having done its work; None for one that was not."""
    status = pod.get("status", {})
    disrupted = condition(pod, "DisruptionTarget")
    if status.get("phase") != "Failed":
        return None
    told = str(status.get("reason", ""))
    reason = LOSS_REASONS.get(told) or DISRUPTION_REASONS.get(str(disrupted.get("reason", "")))
    message = status.get("message") or disrupted.get("message") or ""
    if reason is None:
        if not told:  # its container ended and its restart policy forbids another try
            return None
        # UnexpectedAdmissionError, OutOfcpu, OutOfnvidia.com/gpu, NodeAffinity: a kubelet that refuses.
        reason, message = "NodeRefused", f"{told}: {message}" if message else told
    at = disrupted.get("lastTransitionTime") or _last_end(pod) or pod["metadata"]["creationTimestamp"]
    return Loss(pod["metadata"]["name"], reason, one_line(message) or told, seconds_of(at))


def leaving(pod: Pod) -> Cause:
    """Why a pod goes that nobody scaled down, while it still ends its work."""
    disrupted = condition(pod, "DisruptionTarget")
    if disrupted.get("status") != "True":
        return NO_CAUSE
    reason = DISRUPTION_REASONS.get(str(disrupted.get("reason", "")))
    return NO_CAUSE if reason is None else (reason, one_line(disrupted.get("message", "")))


def uncreated(message: str) -> str:
    """The reason why pods cannot even be made, from the API server's words."""
    if "exceeded quota" in message:
        return "QuotaExceeded"
    return "AdmissionRefused" if is_refused_by_admission(message) else "FailedCreate"


def in_order(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Events as they came, the latest last."""
    return sorted(events, key=_event_seconds)


def _of(pod: Pod, status: Mapping[str, Any], message: str) -> str:
    """The message; which container it is about, too, where there are several."""
    return message if len(container_statuses(pod)) == 1 else f"container {status['name']}: {message}"


def _asked(pod: Pod, resource: str) -> str:
    """What the pod's containers ask of it, in their own words."""
    amounts = []
    for one in pod.get("spec", {}).get("containers") or ():
        resources = one.get("resources") or {}
        amount = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(
            resource
        )
        amounts += [str(amount)] if amount is not None else []
    return " + ".join(amounts) or "none"


def _container(pod: Pod, name: str) -> Mapping[str, Any]:
    spec = pod.get("spec", {})
    everyone = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return next((one for one in everyone if one["name"] == name), {})


# Events are written moments after what they tell, with whole seconds.
_EVENT_SLACK_SECONDS = 5.0


def _span(terminated: Mapping[str, Any]) -> tuple[float, float]:
    began, over = terminated.get("startedAt"), terminated.get("finishedAt")
    return (
        seconds_of(began) if began else float("-inf"),
        seconds_of(over) + _EVENT_SLACK_SECONDS if over else float("inf"),
    )


def _event_seconds(event: Mapping[str, Any]) -> float:
    """When it was last seen; client-go writes it into one of three places."""
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return seconds_of(at) if at else 0.0


def _last_end(pod: Pod) -> str | None:
    ends = [
        status["state"]["terminated"].get("finishedAt")
        for status in container_statuses(pod)
        if "terminated" in status.get("state", {})
    ]
    return max((end for end in ends if end), default=None)

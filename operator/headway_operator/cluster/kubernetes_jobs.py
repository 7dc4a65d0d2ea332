"""Reads the Jobs that judge a model: on their way, ended or out of time, and what they left behind.

Pure. What an attempt left behind is its container's termination message: a verdict, or its last words.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headway_operator.cluster import kubernetes_pods
from headway_operator.cluster.kubernetes_causes import Pod
from headway_operator.cluster.kubernetes_pods import Events
from headway_operator.names import JOB_NAME_LABEL, RUNTIME_CONTAINER
from headway_operator.state import Evaluation

Job = Mapping[str, Any]
DEADLINE_REASON = "DeadlineExceeded"


def evaluation(job: Job, pods: Iterable[Pod], events: Mapping[str, Events] | None = None) -> Evaluation:
    """One Job with its own of the pods. events: by the uid of their pod."""
    name = job["metadata"]["name"]
    own = sorted(
        (pod for pod in pods if (pod["metadata"].get("labels") or {}).get(JOB_NAME_LABEL) == name),
        key=lambda pod: (str(pod["metadata"]["creationTimestamp"]), str(pod["metadata"]["name"])),
    )
    newest = own[-1] if own else None
    ended = condition_of(job, "Complete") or condition_of(job, "Failed")
    if ended is None:
        return _on_its_way(name, newest, events or {})
    if ended.get("reason") == DEADLINE_REASON:
        return Evaluation(name, "timed_out", str(ended.get("message", "")))
    terminated = {} if newest is None else terminated_of(newest)
    if newest is not None and not terminated and not newest["metadata"].get("deletionTimestamp"):
        # The pods were read a moment before the Jobs: what this one leaves behind is seen by the next pass.
        return _on_its_way(name, newest, events or {})
    if not terminated and ended["type"] == "Complete":
        # Evicted, collected or deleted before it was looked at; a drained node takes its pods along.
        return Evaluation(name, "lost", "its pod is gone")
    output = str(terminated.get("message", ""))
    return Evaluation(name, "ended", _words(job, ended, terminated, output), output)


def _on_its_way(name: str, pod: Pod | None, events: Mapping[str, Events]) -> Evaluation:
    if pod is None:
        return Evaluation(name, "pending")
    phase, reason, message = kubernetes_pods.judge(pod, kubernetes_pods.events_of(pod, events))
    cause = ": ".join(part for part in (reason, message) if part)
    is_running = phase in ("starting", "ready")
    return Evaluation(name, "running" if is_running else "pending", cause)


def _words(job: Job, ended: Mapping[str, Any], terminated: Mapping[str, Any], output: str) -> str:
    if not terminated:
        # Its pod is gone, or there never was one.
        return str(ended.get("message", ""))
    cause = f"exited with status {terminated.get('exitCode', 0)}"
    if terminated.get("reason") == "OOMKilled":
        cause = "killed because memory ran out"
    attempts = int(job.get("status", {}).get("failed", 0))
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return f"{cause}{tries}" + (f"; last line: {last}" if last else "")


def terminated_of(pod: Pod) -> Mapping[str, Any]:
    """How the container of an attempt ended; empty while it has not."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    states = (one.get("state", {}) for one in statuses if one.get("name") == RUNTIME_CONTAINER)
    return next((state["terminated"] for state in states if "terminated" in state), {})


def condition_of(job: Job, kind: str) -> Mapping[str, Any] | None:
    """The condition of that type, where it is true."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind and one["status"] == "True"), None)

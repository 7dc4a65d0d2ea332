"""Reads the Jobs that fetch for a ModelCache, on their way, between attempts or ended; lines of progress.

Pure. What an attempt left behind is its container's termination message: its result, or its last words.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway_operator.cluster import kubernetes_pods
from headway_operator.cluster.kubernetes_causes import Pod, one_line, seconds_of
from headway_operator.cluster.kubernetes_jobs import Job, condition_of, terminated_of
from headway_operator.model_cache import Fetch


def pods_of(job: Job, pods: Iterable[Pod]) -> list[Pod]:
    """A Job's own pods, the newest last; those of one that had its name before are none."""
    uid = job["metadata"]["uid"]
    own = [
        pod
        for pod in pods
        if any(one.get("uid") == uid for one in pod["metadata"].get("ownerReferences") or ())
    ]
    return sorted(own, key=lambda pod: (str(pod["metadata"]["creationTimestamp"]), pod["metadata"]["name"]))


def fetch(job: Job, pods: Sequence[Pod]) -> Fetch:
    """One Job. pods: its own, the newest last."""
    status = job.get("status") or {}
    newest = pods[-1] if pods else None
    terminated = {} if newest is None else terminated_of(newest)
    made = Fetch(
        name=job["metadata"]["name"],
        phase="waiting",
        began_at=seconds_of(status.get("startTime") or job["metadata"]["creationTimestamp"]),
        output=str(terminated.get("message", "")),
        failed_attempts=int(status.get("failed") or 0),
    )
    ended = condition_of(job, "Complete") or condition_of(job, "Failed")
    if ended is None:
        return _on_its_way(made, newest, has_ended=bool(terminated))
    if newest is not None and not terminated and not newest["metadata"].get("deletionTimestamp"):
        # The pods were read a moment before the Jobs: what this one leaves behind is seen by the next pass.
        return replace(made, phase="running")
    ended_at = seconds_of(terminated.get("finishedAt") or ended["lastTransitionTime"])
    if ended["type"] == "Complete":
        return replace(made, phase="done", ended_at=ended_at)
    cause = _cause(newest) if newest is not None else ("", one_line(str(ended.get("message", ""))))
    # Pauses between attempts count from the end of the Job, not of its last pod.
    failed_at = seconds_of(ended["lastTransitionTime"])
    return replace(made, phase="failed", ended_at=failed_at, reason=cause[0], message=cause[1])


def _on_its_way(made: Fetch, newest: Pod | None, *, has_ended: bool) -> Fetch:
    if newest is None or has_ended:
        reason, message = ("", "") if newest is None else _cause(newest)
        failed = has_ended or made.failed_attempts > 0
        return replace(made, phase="retrying" if failed else "waiting", reason=reason, message=message)
    replica_phase, reason, message = kubernetes_pods.judge(newest)
    if replica_phase in ("starting", "ready") and not reason:
        return replace(made, phase="running")
    return replace(made, reason=reason, message=message)


def _cause(pod: Pod) -> tuple[str, str]:
    _, reason, message = kubernetes_pods.judge(pod)
    return reason, message


def progress(log: str) -> tuple[int, int] | None:
    """Bytes that are there and bytes wanted, from the last line of a log that tells them."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                told = json.loads(line)
                return int(told["bytes"]), int(told["total_bytes"])
            except (ValueError, TypeError, KeyError):
                continue
    return None


def claim_words(events: Iterable[Mapping[str, Any]]) -> str:
    """The latest words on a claim."""
    ordered = sorted(events, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))
    return one_line(str(ordered[-1].get("message", ""))) if ordered else ""

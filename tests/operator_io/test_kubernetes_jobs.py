"""What a Job and its pods are read as; against a real API server it is in `e2e/test_quality_api.py`."""

from typing import Any

import pytest

from headway_operator.cluster.kubernetes_jobs import evaluation
from headway_operator.state import Evaluation

NAME = "demo-quality-1a2b3c4d"
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}


def job(*conditions: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": "True", "reason": reason, "message": message}
        for kind, reason, message in conditions
    ]
    return {"metadata": {"name": NAME}, "status": {"conditions": listed, **status}}


def pod(
    created: int, state: dict[str, Any], name: str = NAME, *, deleted: bool = False, **status: Any
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": f"{name}-{created}",
        "creationTimestamp": f"2026-01-02T03:04:{created:02}Z",
        "labels": {"batch.kubernetes.io/job-name": name},
    }
    if deleted:
        metadata["deletionTimestamp"] = metadata["creationTimestamp"]
    containers = [{"name": "mesh", "state": {"running": {}}}, {"name": "runtime", "state": state}]
    return {"metadata": metadata, "status": {"containerStatuses": containers, **status}}


def ended(status: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": status, "reason": reason, "message": message}}


DONE, FAILED = ("Complete", "CompletionsReached", ""), ("Failed", "PodFailurePolicy", "exit code 1")
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Evaluation]] = {
    "without a pod yet": (job(), [], Evaluation(NAME, "pending")),
    "unschedulable": (
        job(),
        [pod(1, {}, containerStatuses=[], conditions=[UNSCHEDULED])],
        Evaluation(NAME, "pending", "Unschedulable: no GPU"),
    ),
    "running": (job(), [pod(1, {"running": {}})], Evaluation(NAME, "running")),
    "tried again": (
        job(failed=1),
        [pod(1, ended(2, "no network\n"))],
        Evaluation(
            NAME,
            "pending",
            "CrashLoopBackOff: container runtime: exited with status 2; last line: no network",
        ),
    ),
    "the pod has ended and the Job has not seen it": (
        job(("SuccessCriteriaMet", "", "")),
        [pod(1, ended(0, "{}"))],
        Evaluation(NAME, "pending"),
    ),
    "passed": (
        job(DONE),
        [pod(1, ended(2, "no network")), pod(2, ended(0, "{}"))],
        Evaluation(NAME, "ended", "exited with status 0; last line: {}", "{}"),
    ),
    "failed": (
        job(FAILED, failed=3),
        [pod(2, ended(1, "{}")), pod(1, ended(2, "no network"))],
        Evaluation(NAME, "ended", "exited with status 1 after 3 attempts; last line: {}", "{}"),
    ),
    "out of memory": (
        job(FAILED, failed=1),
        [pod(1, ended(137, reason="OOMKilled"))],
        Evaluation(NAME, "ended", "killed because memory ran out"),
    ),
    "out of time": (
        job(("Failed", "DeadlineExceeded", "Job was active longer than specified deadline")),
        [],
        Evaluation(NAME, "timed_out", "Job was active longer than specified deadline"),
    ),
    "the Job was read after its pod": (job(DONE), [pod(1, {"running": {}})], Evaluation(NAME, "running")),
    "its pod is being deleted with its node": (
        job(FAILED),
        [pod(1, {"running": {}}, deleted=True)],
        Evaluation(NAME, "ended", "exit code 1"),
    ),
    "its pod is gone": (job(DONE), [], Evaluation(NAME, "lost", "its pod is gone")),
    "its pod goes before it was read": (
        job(DONE),
        [pod(1, {"running": {}}, deleted=True)],
        Evaluation(NAME, "lost", "its pod is gone"),
    ),
    "no pod could be made": (
        job(("Failed", "BackoffLimitExceeded", "exceeded quota")),
        [],
        Evaluation(NAME, "ended", "exceeded quota"),
    ),
    "other pods are none of it": (
        job(),
        [pod(1, {"running": {}}, "demo-quality-other")],
        Evaluation(NAME, "pending"),
    ),
}


@pytest.mark.parametrize(("one", "pods", "want"), CASES.values(), ids=CASES)
def test_a_job_is_read_with_what_its_last_pod_left(
    one: dict[str, Any], pods: list[dict[str, Any]], want: Evaluation
) -> None:
    assert evaluation(one, pods) == want


def test_a_volume_that_its_pod_does_not_get_is_what_a_judgement_waits_for() -> None:
    creating = {"name": "runtime", "state": {"waiting": {"reason": "ContainerCreating"}}}
    waiting = pod(1, {}, containerStatuses=[creating])
    waiting["metadata"]["uid"] = "x"
    event = {
        "reason": "FailedMount",
        "message": 'configmap "tasks" not found',
        "lastTimestamp": "2026-01-02T03:05:00Z",
    }
    assert evaluation(job(), [waiting]) == Evaluation(NAME, "pending")
    want = Evaluation(NAME, "pending", 'FailedMount: configmap "tasks" not found')
    assert evaluation(job(), [waiting], {"x": [event]}) == want

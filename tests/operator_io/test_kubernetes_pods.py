"""What a pod's state is read as; the same against a real API server is in `e2e/test_operator_api.py`."""

from typing import Any

import pytest

from headway_operator.cluster import kubernetes_pods as pods

CREATED = "2026-01-02T03:04:05Z"
RUNNING = {"running": {"startedAt": CREATED}}
CRASHED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "loading\nValueError: no layer\n\n"}}
MEMORY = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


def container(state: dict[str, Any], last: dict[str, Any] | None = None, restarts: int = 0) -> dict[str, Any]:
    return {"name": "runtime", "state": state, "lastState": last or {}, "restartCount": restarts}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def pod(*containers: dict[str, Any], ready: str = "False", **status: Any) -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": ready, "lastTransitionTime": CREATED},
    ]
    metadata = {"name": "demo-1a2b-x", "creationTimestamp": CREATED, "labels": {}, "annotations": {}}
    body = {"conditions": conditions, "containerStatuses": list(containers), "podIP": "10.0.0.7"}
    return {"metadata": metadata, "status": body | status}


UNSCHEDULED = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no  node\nfits"}
]
CASES: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "ready": (pod(container(RUNNING), ready="True"), ("ready", "", "")),
    "ready after a crash": (pod(container(RUNNING, CRASHED, 1), ready="True"), ("ready", "", "")),
    "new": (pod(), ("pending", "", "")),
    "unschedulable": (pod(conditions=UNSCHEDULED), ("pending", "Unschedulable", "no node fits")),
    "creating": (pod(container(waiting("ContainerCreating"))), ("pending", "", "")),
    "starting": (pod(container(RUNNING)), ("starting", "", "")),
    "no image": (
        pod(container(waiting("ErrImagePull", "not found"))),
        ("failed", "ErrImagePull", "not found"),
    ),
    "wrong secret": (
        pod(container(waiting("CreateContainerConfigError", 'secret "k" not found'))),
        ("failed", "CreateContainerConfigError", 'secret "k" not found'),
    ),
    "crash loop": (
        pod(container(waiting("CrashLoopBackOff", "back-off 40s"), CRASHED, 3)),
        ("failed", "CrashLoopBackOff", "exited with status 1; last line: ValueError: no layer"),
    ),
    "out of memory": (
        pod(container(waiting("CrashLoopBackOff"), MEMORY, 1)),
        ("failed", "OOMKilled", "killed because memory ran out"),
    ),
    "just ended": (
        pod(container(CRASHED)),
        ("failed", "CrashLoopBackOff", "exited with status 1; last line: ValueError: no layer"),
    ),
    "starting again": (
        pod(container(RUNNING, MEMORY, 2)),
        ("starting", "OOMKilled", "killed because memory ran out"),
    ),
    "an init container fails": (
        pod(
            container(waiting("PodInitializing")),
            initContainerStatuses=[container(waiting("ImagePullBackOff", "fetch:1"))],
        ),
        ("failed", "ImagePullBackOff", "fetch:1"),
    ),
}


@pytest.mark.parametrize(("one", "want"), CASES.values(), ids=CASES)
def test_a_pod_is_read_with_its_real_cause(one: dict[str, Any], want: tuple[str, str, str]) -> None:
    assert pods.judge(one) == want


@pytest.mark.parametrize("one", [one for one, _ in CASES.values()], ids=CASES)
def test_a_pod_that_is_being_deleted_drains_whatever_else_it_says(one: dict[str, Any]) -> None:
    leaving = {**one, "metadata": {**one["metadata"], "deletionTimestamp": CREATED}}
    assert pods.judge(leaving) == ("draining", "", "")


def test_addresses_are_urls_of_either_family() -> None:
    assert pods.address(pod()) == "http://10.0.0.7:8000"
    assert pods.address(pod(podIP="fd00::7")) == "http://[fd00::7]:8000"
    assert pods.address(pod(podIP="")) is None


def test_ended_pods_are_no_replicas() -> None:
    phases = ("Pending", "Running", "Unknown", "Failed", "Succeeded")
    assert [pods.is_live(pod(phase=phase)) for phase in phases] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("num_pods", "state", "want"), [(0, "True", True), (2, "True", False), (0, "False", False)]
)
def test_pods_that_cannot_be_created_count_only_while_some_are_missing(
    num_pods: int, state: str, want: object
) -> None:
    failure = {
        "type": "ReplicaFailure",
        "status": state,
        "reason": "FailedCreate",
        "message": "exceeded quota",
    }
    metadata = {"name": "demo-1a2b", "labels": {}, "creationTimestamp": CREATED}
    deployment = {"metadata": metadata, "spec": {"replicas": 2}, "status": {"conditions": [failure]}}
    replica = pods.uncreated_replica(deployment, num_pods)
    assert (replica is not None) == want
    if replica is not None:
        assert (replica.phase, replica.reason, replica.message) == (
            "failed",
            "FailedCreate",
            "exceeded quota",
        )

"""What a Job that fetches, its pods and their log are read as."""

from typing import Any

import pytest

from headway_operator.cluster import kubernetes_fetches as fetches
from headway_operator.cluster.kubernetes_causes import seconds_of
from headway_operator.model_cache import Fetch

NAME, UID = "llama-fetch-1a2b3c4d", "job-1"
BEGAN, ENDED = "2026-11-01T11:00:00Z", "2026-11-01T11:30:00Z"
MISSING = {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}


def job(*conditions: str, **status: Any) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": "True", "reason": "x", "message": "told", "lastTransitionTime": ENDED}
        for kind in conditions
    ]
    return {
        "metadata": {"name": NAME, "uid": UID, "creationTimestamp": BEGAN},
        "status": {"startTime": BEGAN, "conditions": listed, **status},
    }


def pod(created: int, state: dict[str, Any], uid: str = UID, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"{NAME}-{created}",
            "uid": f"pod-{created}",
            "creationTimestamp": f"2026-11-01T11:0{created}:00Z",
            "ownerReferences": [{"kind": "Job", "uid": uid}],
        },
        "status": {"containerStatuses": [{"name": "runtime", "state": state}], **status},
    }


def ended(status: int, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": status, "reason": "x", "message": message, "finishedAt": ENDED}}


def want(phase: Any, **facts: Any) -> Fetch:
    return Fetch(NAME, phase, seconds_of(BEGAN), **facts)


CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Fetch]] = {
    "without a pod yet": (job(), [], want("waiting")),
    "without its Secret": (
        job(),
        [pod(1, {"waiting": MISSING})],
        want("waiting", reason="CreateContainerConfigError", message=MISSING["message"]),
    ),
    "running": (job(), [pod(1, {"running": {"startedAt": BEGAN}})], want("running")),
    "between attempts": (
        job(failed=1),
        [pod(1, ended(3, '{"error": 1}'))],
        want(
            "retrying",
            reason="ModelFetchFailed",
            message='the model could not be fetched; last line: {"error": 1}',
            output='{"error": 1}',
            failed_attempts=1,
        ),
    ),
    "the second attempt": (
        job(failed=1),
        [pod(1, ended(3, "no network")), pod(2, {"running": {"startedAt": BEGAN}})],
        want("running", failed_attempts=1),
    ),
    "the Job has ended and its pod was read before": (
        job("Complete"),
        [pod(1, {"running": {"startedAt": BEGAN}})],
        want("running"),
    ),
    "done": (
        job("Complete", failed=1),
        [pod(1, ended(3, "no network")), pod(2, ended(0, "{}"))],
        want("done", output="{}", failed_attempts=1, ended_at=seconds_of(ENDED)),
    ),
    "done, and its pod is gone": (job("Complete"), [], want("done", ended_at=seconds_of(ENDED))),
    "given up": (
        job("Failed", failed=7),
        [pod(1, ended(2, "no such flag"))],
        want(
            "failed",
            reason="CrashLoopBackOff",
            message="exited with status 2; last line: no such flag",
            output="no such flag",
            failed_attempts=7,
            ended_at=seconds_of(ENDED),
        ),
    ),
    "given up, and its pods are gone": (
        job("Failed", failed=7),
        [],
        want("failed", message="told", failed_attempts=7, ended_at=seconds_of(ENDED)),
    ),
    "a pod of one that had its name before": (job(), [pod(1, ended(0, "{}"), uid="job-0")], want("waiting")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_is_read_with_its_own_pods(name: str) -> None:
    read, pods, wanted = CASES[name]
    assert fetches.fetch(read, fetches.pods_of(read, reversed(pods))) == wanted


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", None),
        ("fetching hf://a/b\n", None),
        ('{"bytes": 1, "total_bytes": 9}\nhf://a/b: connection broke\n', (1, 9)),
        ('{"bytes": 1, "total_bytes": 9}\n{"bytes": 2, "total_bytes": 9}\n{"byt', (2, 9)),
        ('{"bytes": null, "total_bytes": 9}', None),
    ],
)
def test_the_last_line_of_progress_counts(log: str, told: tuple[int, int] | None) -> None:
    assert fetches.progress(log) == told


def test_the_latest_words_of_events_count() -> None:
    def event(reason: str, message: str, second: int) -> dict[str, str]:
        return {"reason": reason, "message": message, "lastTimestamp": f"2026-11-01T11:00:0{second}Z"}

    events = [event("ProvisioningFailed", "new\nwords", 3), event("ProvisioningFailed", "old", 1)]
    assert fetches.claim_words(events) == "new words"
    assert fetches.claim_words([]) == ""

"""What a pod's state is read as; the same against a real API server is in `e2e/test_api_pods.py`."""

import copy
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator.cluster import kubernetes_causes as causes
from headway_operator.cluster import kubernetes_pods as pods
from headway_operator.cluster.kubernetes_observation import Found, observed
from headway_operator.names import GROUP_INDEX_LABEL, GROUP_SET_LABEL, component_labels
from headway_operator.state import ServiceKey, Start, is_crashing

RECORDED = yaml.safe_load(Path(__file__).with_name("pods.yaml").read_text())
# An hour after the pods were made.
NOW = datetime.fromisoformat("2026-11-01T11:00:00Z").timestamp()
CREATED = "2026-01-02T03:04:05Z"


def pod(case: dict[str, Any]) -> dict[str, Any]:
    """A recorded pod: what all have in common, and what this one adds."""
    made: dict[str, Any] = copy.deepcopy(RECORDED["common"])
    made["metadata"] |= case.get("metadata", {})
    added = case.get("spec", {})
    made["spec"] |= {name: value for name, value in added.items() if name != "containers"}
    made["spec"]["containers"] += added.get("containers", [])
    return made | {"status": case["status"]}


def seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


@pytest.mark.parametrize("case", RECORDED["cases"].values(), ids=RECORDED["cases"])
def test_a_pod_is_read_with_its_real_cause(case: dict[str, Any]) -> None:
    events = case.get("events", [])
    assert [*pods.judge(pod(case), events)] == case["want"]
    # Events are asked for where they may tell more, and only there.
    assert pods.needs_events(pod(case), NOW) or not events


@pytest.mark.parametrize("case", RECORDED["cases"].values(), ids=RECORDED["cases"])
def test_a_pod_that_is_being_deleted_drains_whatever_else_it_says(case: dict[str, Any]) -> None:
    leaving = pod(case)
    leaving["metadata"]["deletionTimestamp"] = CREATED
    assert pods.judge(leaving)[0] == "draining"
    assert not pods.needs_events(leaving, NOW)


def test_what_a_pod_waits_for_is_asked_a_minute_after_it_has_its_node() -> None:
    creating = pod(RECORDED["cases"]["a volume's secret is missing"])
    scheduled_at = seconds("2026-11-01T10:00:01Z")
    assert [pods.needs_events(creating, scheduled_at + age) for age in (59.0, 60.0)] == [False, True]
    for case in ("just made", "no node has a GPU", "loads its model", "ready", "image is never pulled"):
        has_begun = case in ("loads its model", "ready")
        has_node = has_begun or case == "image is never pulled"
        want = has_node and not has_begun
        assert pods.needs_events(pod(RECORDED["cases"][case]), scheduled_at + 3600) == want, case


@pytest.mark.parametrize("case", RECORDED["losses"].values(), ids=RECORDED["losses"])
def test_a_pod_that_was_taken_away_says_by_whom_and_when(case: dict[str, Any]) -> None:
    loss = causes.loss(pod(case))
    assert loss is not None
    assert [loss.reason, loss.message, loss.at] == [*case["want"][:2], seconds(case["want"][2])]


def test_pods_that_ended_by_themselves_are_no_losses() -> None:
    for status in ({"phase": "Succeeded"}, {"phase": "Failed"}, {"phase": "Running", "reason": "Evicted"}):
        assert causes.loss(pod({"status": status})) is None


def test_a_start_is_told_by_its_parts() -> None:
    ready = pod(RECORDED["cases"]["ready"])
    assert pods.replica(ready).start == Start(1.0, 11.0, 0.0, 38.0)
    fetched = {"startedAt": "2026-11-01T10:00:03Z", "finishedAt": "2026-11-01T10:00:10Z", "exitCode": 0}
    with_init = copy.deepcopy(ready)
    with_init["status"]["initContainerStatuses"] = [
        {"name": "fetch", "restartCount": 0, "state": {"terminated": fetched}},
        {"name": "mesh", "restartCount": 0, "state": {"running": {"startedAt": "2026-11-01T10:00:11Z"}}},
    ]
    assert pods.replica(with_init).start == Start(1.0, 4.0, 7.0, 38.0)
    restarted = copy.deepcopy(ready)
    restarted["status"]["containerStatuses"][0]["restartCount"] = 1
    assert pods.replica(restarted).start is None
    assert pods.replica(pod(RECORDED["cases"]["loads its model"])).start is None


def test_restarts_are_those_of_the_server_alone() -> None:
    for case, want in (
        ("its init container tried twice and it loads its model", 0),
        ("its sidecar came back and it loads its model", 0),
        ("memory of its node ran out", 0),
        ("ended by a signal", 1),
        ("crashes over and over", 5),
    ):
        replica = pods.replica(pod(RECORDED["cases"][case]))
        assert (replica.num_restarts, is_crashing(replica)) == (want, want > 0), case


@pytest.mark.parametrize(
    ("leader", "worker", "want"),
    [
        ("loads its model", "loads its model", (0, False, True)),
        ("loads its model", "ended by a signal", (1, True, True)),
        ("ended by a signal", "crashes over and over", (6, True, True)),
        ("loads its model", "its sidecar came back and it loads its model", (0, False, True)),
        ("ready", "ready", (0, False, False)),
    ],
)
def test_a_group_of_pods_restarts_with_any_of_its_servers(
    leader: str, worker: str, want: tuple[int, bool, bool]
) -> None:
    made = []
    for number, (case, component) in enumerate(((leader, "runtime"), (worker, "worker"))):
        one = pod(RECORDED["cases"][case])
        group = {GROUP_SET_LABEL: "demo-1a2b", GROUP_INDEX_LABEL: "0"}
        labels = component_labels("demo", component) | group
        one["metadata"] |= {"name": f"demo-{number}", "labels": labels}
        made.append(one)
    (replica,) = observed(ServiceKey("default", "demo"), "u1", Found({}, made)).replicas
    assert (replica.num_restarts, is_crashing(replica), replica.start is None) == want


def test_addresses_are_urls_of_either_family() -> None:
    ready = pod(RECORDED["cases"]["ready"])
    assert pods.address(ready) == "http://10.244.0.7:8000"
    ready["status"] = ready["status"] | {"podIP": "fd00::7"}
    assert pods.address(ready) == "http://[fd00::7]:8000"
    assert pods.address(pod(RECORDED["cases"]["just made"])) is None


def test_ended_pods_are_no_replicas() -> None:
    phases = ("Pending", "Running", "Unknown", "Failed", "Succeeded")
    assert [pods.is_live(pod({"status": {"phase": phase}})) for phase in phases] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("message", "want"),
    [
        (
            (
                'pods "demo-1a2b-x" is forbidden: exceeded quota: gpus, requested: gpu=1, '
                "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
            ),
            "QuotaExceeded",
        ),
        (
            (
                'pods "demo-1a2b-x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes '
                '(volume "models")'
            ),
            "AdmissionRefused",
        ),
        (
            'admission webhook "policy.example.com" denied the request: images must come from our registry',
            "AdmissionRefused",
        ),
        (
            (
                'Internal error occurred: failed calling webhook "policy.example.com": Post '
                '"https://policy.default.svc:443/?timeout=10s": no endpoints available for service "policy"'
            ),
            "AdmissionRefused",
        ),
        ('serviceaccounts "models" not found', "FailedCreate"),
    ],
)
def test_pods_that_cannot_be_created_say_who_refuses_them(message: str, want: str) -> None:
    replica = pods.uncreated_replica(unable(message), 0)
    assert replica is not None
    assert (replica.phase, replica.reason, replica.message) == ("failed", want, message)


@pytest.mark.parametrize(
    ("num_pods", "state", "want"), [(0, "True", True), (2, "True", False), (0, "False", False)]
)
def test_pods_that_cannot_be_created_count_only_while_some_are_missing(
    num_pods: int, state: str, want: object
) -> None:
    assert (pods.uncreated_replica(unable("exceeded quota", state), num_pods) is not None) == want


def unable(message: str, state: str = "True") -> dict[str, Any]:
    """A Deployment for two pods whose ReplicaSet cannot make them."""
    failure = {"type": "ReplicaFailure", "status": state, "reason": "FailedCreate", "message": message}
    metadata = {"name": "demo-1a2b", "labels": {}, "creationTimestamp": CREATED}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": {"conditions": [failure]}}

"""What the operator reads of pods on a real API server without a node: whose they are, phases and causes.

The pods here are written by the tests, with the status a kubelet would give them.
"""

import time
from typing import Any

import pytest

from e2e.api_objects import CRASHED, RUNNING, Json, condition, make_deployment, pod, status
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_preparation import PATIENCE_SECONDS
from headway_operator.state import Replica, ServiceKey

PODS: dict[str, tuple[Json, tuple[str, str, str]]] = {
    "ready": (status(ready=True, running=RUNNING), ("ready", "", "")),
    "starting": (status(running=RUNNING), ("starting", "", "")),
    "creating": (status(waiting={"reason": "ContainerCreating"}), ("pending", "", "")),
    "unschedulable": (
        {
            "phase": "Pending",
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                }
            ],
        },
        (
            "pending",
            "Unschedulable",
            (
                "not enough nvidia.com/gpu on any node, 1 asked: "
                "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            ),
        ),
    ),
    "image": (
        status(waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "image:1"'}),
        ("failed", "ImagePullBackOff", 'Back-off pulling image "image:1"'),
    ),
    "crash": (
        status(restarts=4, last=CRASHED, waiting={"reason": "CrashLoopBackOff", "message": "back-off 1m"}),
        ("failed", "CrashLoopBackOff", "exited with status 1; last line: ValueError: no such layer"),
    ),
    "memory": (
        status(
            restarts=1,
            last={"exitCode": 137, "reason": "OOMKilled"},
            waiting={"reason": "CrashLoopBackOff"},
        ),
        ("failed", "OOMKilled", "exit 137: killed because memory ran out; its memory limit is 2Gi"),
    ),
    "ended": (
        status(terminated={"exitCode": 2, "reason": "Error"}),
        ("failed", "CrashLoopBackOff", "exited with status 2"),
    ),
    "again": (
        status(restarts=1, last=CRASHED, running=RUNNING),
        ("starting", "CrashLoopBackOff", "exited with status 1; last line: ValueError: no such layer"),
    ),
}


async def test_pods_tell_their_phase_and_the_real_cause(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    await make_deployment(api, key, "demo-1a2b")
    for name, (pod_status, _) in PODS.items():
        await api.create(pod(key, name))
        await api.patch("Pod", key.namespace, name, {"status": pod_status}, "status")
    for name, phase in (("evicted", "Failed"), ("done", "Succeeded")):
        await api.create(pod(key, name))
        await api.patch("Pod", key.namespace, name, {"status": {"phase": phase}}, "status")
    observed = await cluster.observe(key)
    got = {one.name: (one.phase, one.reason, one.message) for one in observed.replicas}
    assert got == {name: want for name, (_, want) in PODS.items()}
    ready: Replica = next(one for one in observed.replicas if one.name == "ready")
    assert (ready.revision, ready.address) == ("1a2b", "http://10.1.2.3:8000")
    assert ready.ready_at == pytest.approx(1767323045.0)
    crash = next(one for one in observed.replicas if one.name == "crash")
    assert (crash.num_restarts, crash.ready_at) == (4, None)
    await cluster.set_deletion_cost(key, "ready", 7)
    await cluster.set_deletion_cost(key, "gone", 7)
    await api.delete("Pod", key.namespace, "ready")  # bound to a node: stays until its kubelet has ended it
    observed = await cluster.observe(key)
    ready = next(one for one in observed.replicas if one.name == "ready")
    assert (ready.phase, ready.deletion_cost) == ("draining", 7)


async def test_pods_that_somebody_else_made_are_no_replicas_and_no_gateways(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    for component, deployment in (("runtime", "demo-1a2b"), ("gateway", "demo-gateway")):
        await make_deployment(api, key, deployment)
        for name, is_made_by_hand in (("copied", True), ("own", False)):
            made = pod(key, f"{component}-{name}", component)
            if is_made_by_hand:
                del made["metadata"]["ownerReferences"]
            await api.create(made)
            told = PODS["crash" if is_made_by_hand else "ready"][0]
            await api.patch("Pod", key.namespace, f"{component}-{name}", {"status": told}, "status")
    observed = await cluster.observe(key)
    assert [(one.name, one.phase) for one in observed.replicas] == [("runtime-own", "ready")]
    assert (observed.gateway.reason, observed.gateway.addresses) == ("", ("http://10.1.2.3:8000",))


async def test_the_gateway_is_ready_when_one_of_its_pods_is(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    await make_deployment(api, key, "demo-gateway")
    await api.create(pod(key, "old", "gateway"))
    await api.patch("Pod", key.namespace, "old", {"status": PODS["image"][0]}, "status")
    gateway = (await cluster.observe(key)).gateway
    assert (gateway.ready, gateway.reason, gateway.addresses) == (False, "ImagePullBackOff", ())
    await api.create(pod(key, "new", "gateway"))
    await api.patch("Pod", key.namespace, "new", {"status": PODS["ready"][0]}, "status")
    observed = await cluster.observe(key)
    assert (observed.gateway.ready, observed.gateway.addresses) == (True, ("http://10.1.2.3:8000",))
    assert observed.replicas == ()


async def test_a_volume_that_a_pod_does_not_get_is_named_from_its_events(
    api: KubernetesApi, key: ServiceKey
) -> None:
    cluster = KubernetesCluster(
        api, runtime_image="", gateway_image="", clock=lambda: time.time() + PATIENCE_SECONDS + 1
    )
    words = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
    for component, deployment in (("runtime", "demo-1a2b"), ("gateway", "demo-gateway")):
        await make_deployment(api, key, deployment)
        made = await api.create(pod(key, f"demo-{component}", component))
        name, uid = made["metadata"]["name"], made["metadata"]["uid"]
        creating = status(waiting={"reason": "ContainerCreating"})
        await api.patch("Pod", key.namespace, name, {"status": {**creating, "phase": "Pending"}}, "status")
        await api.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{name}.1", "namespace": key.namespace},
                "involvedObject": {"kind": "Pod", "namespace": key.namespace, "name": name, "uid": uid},
                "reason": "FailedMount",
                "message": words,
                "type": "Warning",
                "lastTimestamp": "2026-01-02T03:03:00Z",
            }
        )
    observed = await cluster.observe(key)
    (replica,) = observed.replicas
    assert (replica.phase, replica.reason, replica.message) == ("pending", "FailedMount", words)
    assert (observed.gateway.reason, observed.gateway.message) == ("FailedMount", words)


async def test_pods_that_cannot_be_created_show_as_a_failed_replica(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    outcome = await take_pass()
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "exceeded quota",
    }
    name = outcome.status["revision"]["name"]
    await api.patch("Deployment", key.namespace, name, {"status": {"conditions": [failure]}}, "status")
    (replica,) = (await cluster.observe(key)).replicas
    assert (replica.phase, replica.reason, replica.message) == ("failed", "QuotaExceeded", "exceeded quota")
    outcome = await take_pass()
    assert condition(outcome.status, "Ready")["reason"] == "QuotaExceeded"
    await api.patch(
        "Deployment", key.namespace, "demo-gateway", {"status": {"conditions": [failure]}}, "status"
    )
    gateway = (await cluster.observe(key)).gateway
    assert (gateway.ready, gateway.reason, gateway.message) == (False, "QuotaExceeded", "exceeded quota")

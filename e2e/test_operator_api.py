"""The operator's calls to a real API server without a node: whose object is whose, scaling, events, keys."""

import asyncio
import copy
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.api_objects import Json, children, condition
from e2e.conftest import eventually
from e2e.operator_process import running_operator
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_keys import load_or_create_keys
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.cluster.kubernetes_paths import API_VERSIONS
from headway_operator.errors import ClusterError, ConflictError, UnavailableError
from headway_operator.state import ChildKey, ServiceKey


async def test_a_pass_makes_owned_children_and_a_second_one_changes_nothing(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    outcome = await take_pass()
    assert outcome.problems == []
    made = await children(api, key)
    service = await cluster.fetch(key)
    assert service is not None
    revision = service["status"]["revision"]["name"]
    assert set(made) >= {
        *(f"Deployment {name}" for name in ("demo-gateway", revision)),
        *("Service demo", "Service demo-replicas", "ConfigMap demo-admin", "ConfigMap demo-memory"),
        *(f"{kind} demo-gateway" for kind in ("ServiceAccount", "Role", "RoleBinding")),
    }
    for child in made.values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("InferenceService", service["metadata"]["uid"])
    assert made[f"Deployment {revision}"]["spec"]["replicas"] == 2  # minReplicas, through /scale
    assert service["status"]["desiredReplicas"] == 2
    assert condition(service["status"], "Ready")["status"] == "False"
    assert "finalizers" not in service["metadata"]
    await take_pass()
    await take_pass()
    cluster._applied.clear()  # apply in earnest once more
    await take_pass()
    again = await children(api, key)
    assert {name: child["metadata"]["resourceVersion"] for name, child in again.items()} == {
        name: child["metadata"]["resourceVersion"] for name, child in made.items()
    }


async def test_replicas_are_left_to_scale_and_drift_is_undone(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    outcome = await take_pass()
    revision = outcome.status["revision"]["name"]
    await cluster.scale(key, revision, 3)
    observed = await cluster.observe(key)
    assert [(one.name, one.replicas) for one in observed.revisions] == [(revision, 3)]
    deployment = await api.get("Deployment", key.namespace, revision)
    assert deployment is not None
    applied = [m for m in deployment["metadata"]["managedFields"] if m["operation"] == "Apply"]
    assert [m["manager"] for m in applied] == ["headway-operator"]
    assert "f:replicas" not in applied[0]["fieldsV1"]["f:spec"]
    await api.patch("Service", key.namespace, "demo", {"spec": {"selector": {"app": "else"}}})
    await api.delete("Service", key.namespace, "demo-replicas")
    cluster._applied.clear()  # a minute later
    await take_pass()
    service = await api.get("Service", key.namespace, "demo")
    assert service is not None
    assert service["spec"]["selector"]["serving.headway.dev/component"] == "gateway"
    assert await api.get("Service", key.namespace, "demo-replicas") is not None
    with pytest.raises(ClusterError, match="cannot scale 'demo-none'"):
        await cluster.scale(key, "demo-none", 1)


async def test_an_object_of_someone_else_is_left_alone_and_reported(
    api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo", "namespace": key.namespace},
        "spec": {"selector": {"app": "mine"}, "ports": [{"port": 1234}]},
    }
    await api.create(foreign)
    outcome = await take_pass()
    assert [one.step for one in outcome.problems] == ["apply Service demo"]
    assert "exists and is not owned by this InferenceService" in outcome.problems[0][1]
    degraded = condition(outcome.status, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ObjectConflict")
    found = await api.get("Service", key.namespace, "demo")
    assert found is not None
    assert found["spec"]["selector"] == {"app": "mine"}
    assert "Deployment demo-gateway" in await children(api, key)
    await api.delete("Service", key.namespace, "demo")
    outcome = await take_pass()
    assert outcome.problems == []


async def test_a_status_replaces_the_one_before_it(key: ServiceKey, cluster: KubernetesCluster) -> None:
    await cluster.write_status(key, {"replicas": 3, "url": "http://demo", "limits": {"maxNumSeqs": 8}})
    await cluster.write_status(key, {"replicas": 2})
    service = await cluster.fetch(key)
    assert service is not None
    assert service["status"] == {"replicas": 2}
    assert service["metadata"]["generation"] == 1
    with pytest.raises(ClusterError, match="404"):
        await cluster.write_status(ServiceKey(key.namespace, "gone"), {"replicas": 1})


async def test_the_checkpoint_belongs_to_one_life_of_a_service(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    assert await cluster.load_memory(key) is None
    await cluster.save_memory(key, {"version": 1, "slices": [1, 2]}, 0.0)
    assert await cluster.load_memory(key) == {"version": 1, "slices": [1, 2]}
    service = await cluster.fetch(key)
    assert service is not None
    await api.delete("InferenceService", key.namespace, "demo")
    service["metadata"] = {"name": "demo", "namespace": key.namespace}
    await api.create(service)
    cluster.forget(key)
    assert await cluster.load_memory(key) is None
    with pytest.raises(ConflictError):  # until the garbage collector has taken the old one
        await cluster.save_memory(key, {"version": 1}, 0.0)


async def test_another_autoscaler_of_the_service_is_noticed(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    assert (await cluster.observe(key)).other_scaler == ""
    target = {"apiVersion": API_VERSIONS["InferenceService"], "kind": "InferenceService", "name": "demo"}
    await api.create(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "rival", "namespace": key.namespace},
            "spec": {"scaleTargetRef": target, "maxReplicas": 9},
        }
    )
    assert (await cluster.observe(key)).other_scaler == "HorizontalPodAutoscaler/rival"


async def test_prune_deletes_and_absent_is_success(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    await take_pass()
    child = ChildKey("Deployment", "demo-gateway")
    await cluster.prune(key, child)
    assert await api.get("Deployment", key.namespace, "demo-gateway") is None
    await cluster.prune(key, child)
    await take_pass()
    assert await api.get("Deployment", key.namespace, "demo-gateway") is not None


async def test_the_same_event_is_counted_and_storms_are_cut(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    for _ in range(3):
        await cluster.emit(key, "Warning", "OOMKilled", "killed because memory ran out")
    (event,) = await api.list("Event", key.namespace)
    assert (event["reason"], event["type"], event["count"]) == ("OOMKilled", "Warning", 3)
    service = await cluster.fetch(key)
    assert service is not None
    assert event["involvedObject"]["uid"] == service["metadata"]["uid"]
    restarted = KubernetesCluster(api, runtime_image="", gateway_image="")
    await restarted.emit(key, "Warning", "OOMKilled", "killed because memory ran out")
    (event,) = await api.list("Event", key.namespace)
    assert event["count"] == 4
    for number in range(40):
        await restarted.emit(key, "Normal", f"Reason{number}", "words")
    # Its burst, of which one went into the count above.
    assert len(await api.list("Event", key.namespace)) == 25


async def test_two_operators_that_start_at_once_share_one_key_pair(
    api: KubernetesApi, key: ServiceKey
) -> None:
    one, two = await asyncio.gather(
        load_or_create_keys(api, key.namespace), load_or_create_keys(api, key.namespace)
    )
    assert one.private_pem() == two.private_pem()
    third = await load_or_create_keys(api, key.namespace)
    assert third.public_pem == one.public_pem


async def test_one_operator_at_a_time_holds_the_lease(api: KubernetesApi, key: ServiceKey) -> None:
    now = 0.0
    first, second = (
        Lease(api, key.namespace, name, lease_seconds=30, margin_seconds=10, clock=lambda: now)
        for name in ("first", "second")
    )
    await first.seek()
    await second.seek()
    assert (first.is_held, second.is_held) == (True, False)
    now = 20.0
    await first.seek()
    await second.seek()
    now = 39.0
    assert (first.is_held, second.is_held) == (True, False)
    now = 40.0  # the first knows by itself that it is too late; what it has begun may still end
    assert (first.is_held, second.is_held) == (False, False)
    now = 49.0  # the second has seen the renewal 29 s ago
    await second.seek()
    assert (first.is_held, second.is_held) == (False, False)
    now = 50.0
    await second.seek()
    assert second.is_held
    await first.seek()
    assert (first.is_held, second.is_held) == (False, True)
    await second.release()
    await first.seek()
    assert (first.is_held, second.is_held) == (True, False)


def elsewhere(kubeconfig: Path, port: int) -> Path:
    """A kubeconfig for another port of this machine."""
    document = yaml.safe_load(kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    path = kubeconfig.with_name(f"kubeconfig-{port}")
    path.write_text(yaml.safe_dump(document))
    return path


async def test_an_api_server_that_is_away_is_unavailable(kubeconfig: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts and says nothing
        path = elsewhere(kubeconfig, listener.getsockname()[1])
        connected = await KubernetesApi.connect(path)
        connected._timeout_seconds = 0.5
        async with connected as api:
            with pytest.raises(UnavailableError, match=r"no answer within 0.5 s"):
                await api.list("Pod", "default")
    async with await KubernetesApi.connect(path) as api:
        with pytest.raises(UnavailableError):
            await api.list("Pod", "default")


async def test_the_operator_process_follows_services_and_ends_in_time(
    api: KubernetesApi, key: ServiceKey, kubeconfig: Path, cluster: KubernetesCluster
) -> None:
    async with running_operator(kubeconfig, key.namespace) as operator:

        async def status_of(name: str) -> Json:
            found = await cluster.fetch(ServiceKey(key.namespace, name))
            return (found or {}).get("status") or {}

        async def is_observed(generation: int) -> bool:
            return (await status_of("demo")).get("observedGeneration") == generation

        await eventually(lambda: is_observed(1))
        await api.patch("InferenceService", key.namespace, "demo", {"spec": {"scaling": {"minReplicas": 3}}})
        await eventually(lambda: is_observed(2))
        service = await cluster.fetch(key)
        assert service is not None
        assert service["status"]["desiredReplicas"] == 3
        assert "finalizers" not in service["metadata"]
        assert not [name for name in service["metadata"].get("annotations", {}) if "kopf" in name]
        second = copy.deepcopy(service)
        second["metadata"] = {"name": "second", "namespace": key.namespace}
        await api.create(second)
        await eventually(lambda: status_of("second"))
        await api.delete("InferenceService", key.namespace, "second")

        async def is_one() -> bool:
            status, health = await operator.health()
            assert status == 200
            return int(health["services"]) == 1

        await eventually(is_one)
        metrics = await operator.metrics()
        assert "headway_operator_reconcile_seconds_count" in metrics
        assert f'headway_operator_replicas_wanted{{name="demo",namespace="{key.namespace}"}} 3.0' in metrics
        lease = await api.get("Lease", key.namespace, "headway-operator")
        assert lease is not None
        assert lease["spec"]["holderIdentity"]
        stopped_at = time.monotonic()
        operator.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(operator.process.wait(), 30)
        assert time.monotonic() - stopped_at < 5
    assert operator.process.returncode == 0, operator.output
    assert "Traceback" not in operator.output, operator.output
    lease = await api.get("Lease", key.namespace, "headway-operator")
    assert lease is not None
    assert not lease["spec"].get("holderIdentity")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

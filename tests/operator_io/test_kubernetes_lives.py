"""Whose objects are whose, and a Lease that cannot be read, on an API that is told what to say."""

import asyncio
import base64
import logging
import random
from collections.abc import Mapping
from typing import Any

import pytest

from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.names import KIND, POD_TEMPLATE_HASH_LABEL, ChildKey, ServiceKey, component_labels
from headway_operator.times import seconds, timestamp


class ToldApi:
    """Answers `get` with `objects` and `list` with `lists`, by kind; keeps what is applied."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.lists: dict[str, list[Any]] = {}
        self.asked: list[str] = []
        self.created = asyncio.Event()

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        return self.objects.get(kind)

    async def list(self, kind: str, namespace: str, labels: str = "", fields: str = "") -> list[Any]:
        self.asked.append(kind)
        return self.lists.get(kind, [])

    async def served_kinds(self, api_version: str) -> frozenset[str]:
        return frozenset()

    async def apply(self, manifest: Mapping[str, Any], *, force: bool, subresource: str = "") -> Any:
        self.objects[manifest["kind"]] = manifest
        return manifest

    async def patch(self, kind: str, namespace: str, name: str, body: Mapping[str, Any]) -> Any:
        return body

    async def create(self, manifest: Mapping[str, Any]) -> Any:
        self.created.set()
        return manifest


@pytest.fixture
def api() -> Any:
    return ToldApi()


async def test_a_service_made_anew_does_not_take_over_the_checkpoint_of_the_deleted_one(
    api: Any, key: ServiceKey
) -> None:
    cluster = KubernetesCluster(api, runtime_image="", gateway_image="")
    api.objects[KIND] = {"metadata": {"uid": "first"}}
    await cluster.fetch(key)
    await cluster.save_memory(key, {"version": 1}, 0.0)
    assert await cluster.load_memory(key) == {"version": 1}
    api.objects[KIND] = {"metadata": {"uid": "second"}}  # deleted and made between two passes
    await cluster.fetch(key)
    assert await cluster.load_memory(key) is None


@pytest.mark.parametrize(
    ("num_replicas", "part", "most_bytes"),
    [pytest.param(3, "data", 256 * 1024, id="short"), pytest.param(2000, "binaryData", 700_000, id="long")],
)
async def test_a_long_checkpoint_is_compressed_and_read_again(
    api: Any, key: ServiceKey, num_replicas: int, part: str, most_bytes: int
) -> None:
    """The API server accepts 1 MiB."""
    cluster = KubernetesCluster(api, runtime_image="", gateway_image="")
    api.objects[KIND] = {"metadata": {"uid": "first"}}
    await cluster.fetch(key)
    chance = random.Random(3)
    memory = {
        "version": 2,
        "baselines": {
            f"demo-{number}": {"totals": [chance.randrange(10**6) for _ in range(40)], "targets": [600, 40]}
            for number in range(num_replicas)
        },
    }
    await cluster.save_memory(key, memory, 0.0)
    kept = api.objects["ConfigMap"]
    assert part in kept
    assert (
        sum(len(text) for name in ("data", "binaryData") for text in kept.get(name, {}).values()) < most_bytes
    )
    assert await cluster.load_memory(key) == memory
    if part == "binaryData":
        damaged = bytearray(base64.b64decode(kept["binaryData"]["memory.json.gz"]))
        damaged[len(damaged) // 2] ^= 0xFF
        for text in (b"not gzip", bytes(damaged)):
            kept["binaryData"] = {"memory.json.gz": base64.b64encode(text).decode()}
            assert await cluster.load_memory(key) is None


def deployment(name: str, owner: str = "mine") -> dict[str, Any]:
    owners = [{"kind": KIND, "uid": owner, "controller": True}] if owner else []
    metadata = {"name": name, "creationTimestamp": "2026-01-02T03:04:05Z", "ownerReferences": owners}
    labels = component_labels("demo", "gateway" if name.endswith("-gateway") else "runtime")
    return {"metadata": {**metadata, "labels": labels}, "spec": {"replicas": 1}}


def pod(key: ServiceKey, component: str, created_at: float) -> dict[str, Any]:
    """Of `demo-1a2b`, or of `demo-gateway`; its node has it for ten seconds less, and nothing has begun."""
    parent = "demo-gateway" if component == "gateway" else "demo-1a2b"
    owner = {"kind": "ReplicaSet", "name": f"{parent}-6f7c9", "uid": "r", "controller": True}
    metadata: dict[str, Any] = {"name": "demo-x", "namespace": key.namespace, "uid": "x"}
    metadata |= {"labels": component_labels(key.name, component) | {POD_TEMPLATE_HASH_LABEL: "6f7c9"}}
    metadata |= {"ownerReferences": [owner], "creationTimestamp": timestamp(created_at)}
    since = timestamp(created_at + 10)
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Pending", "conditions": [scheduled]}}


async def test_what_only_carries_the_labels_of_a_child_is_none(api: Any, key: ServiceKey) -> None:
    cluster = KubernetesCluster(api, runtime_image="", gateway_image="")
    api.objects[KIND] = {"metadata": {"uid": "mine"}}
    api.lists["Deployment"] = [
        deployment("demo-1a2b", "mine"),
        deployment("a", ""),
        deployment("b", "former"),
    ]
    observed = await cluster.observe(key)
    assert observed.children == {ChildKey("Deployment", "demo-1a2b")}
    assert [revision.name for revision in observed.revisions] == ["demo-1a2b"]


@pytest.mark.parametrize("component", ["runtime", "gateway"])
async def test_what_a_pod_waits_for_on_its_node_is_asked_when_it_has_waited(
    api: Any, key: ServiceKey, component: str
) -> None:
    since, now = seconds("2026-11-01T10:00:10Z"), 0.0
    cluster = KubernetesCluster(api, runtime_image="", gateway_image="", clock=lambda: now)
    api.objects[KIND] = {"metadata": {"uid": "mine"}}
    api.lists["Deployment"] = [deployment("demo-1a2b"), deployment("demo-gateway")]
    api.lists["Pod"] = [pod(key, component, since - 10)]
    words = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
    event = {"reason": "FailedMount", "message": words, "lastTimestamp": timestamp(since + 40)}
    api.lists["Event"] = [event]
    for age, want in ((59.0, ("", "")), (60.0, ("FailedMount", words))):
        now = since + age
        observed = await cluster.observe(key)
        (one,) = (observed.gateway,) if component == "gateway" else observed.replicas
        assert (one.reason, one.message) == want


@pytest.mark.parametrize("component", ["runtime", "gateway"])
async def test_a_pod_that_only_carries_the_labels_is_not_counted_and_not_asked_about(
    api: Any, key: ServiceKey, component: str
) -> None:
    cluster = KubernetesCluster(api, runtime_image="", gateway_image="")
    api.objects[KIND] = {"metadata": {"uid": "mine"}}
    api.lists["Deployment"] = [deployment("demo-1a2b"), deployment("demo-gateway")]
    made = pod(key, component, 0.0)
    made["status"]["podIP"] = "10.1.2.3"
    made["status"]["conditions"].append({"type": "Ready", "status": "True"})
    api.lists["Pod"] = [made]
    observed = await cluster.observe(key)
    assert (len(observed.replicas), observed.gateway.ready) == ((1, False), (0, True))[component == "gateway"]
    made["metadata"]["ownerReferences"] = []
    observed = await cluster.observe(key)
    assert (observed.replicas, observed.gateway.ready, observed.gateway.addresses) == ((), False, ())
    del made["status"]["conditions"][1]
    api.asked.clear()
    await cluster.observe(key)
    assert "Event" not in api.asked


async def test_a_lease_that_cannot_be_read_is_asked_for_again(
    api: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    api.objects["Lease"] = {"metadata": {}}  # nobody writes such a one, but then nobody would lead
    lease = Lease(api, "headway-system", "me", retry_seconds=0.01)
    with caplog.at_level(logging.ERROR):
        seeking = asyncio.create_task(lease.run())
        await eventually(lambda: caplog.records)
    del api.objects["Lease"]
    async with asyncio.timeout(10):
        await api.created.wait()
    assert not seeking.done()
    seeking.cancel()
    await asyncio.gather(seeking, return_exceptions=True)

"""What stands around a service, and where its pods may run, on a real API server without a node.

It holds the rules of the fields, takes every child as it is rendered, and has or lacks the kinds of the
Prometheus operator, which come and go while this operator runs.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.api_objects import created_dry
from e2e.cluster.binaries import build
from e2e.cluster.definitions import MONITORING, definitions
from e2e.cluster.settings import read_settings
from e2e.conftest import CRD_PATH, FACT_SECONDS, eventually
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_discovery import ASK_AGAIN_SECONDS
from headway_operator.errors import ClusterError
from headway_operator.keys import AdminKeys
from headway_operator.names import MONITORING_KINDS
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

Json = dict[str, Any]
AROUND = ("PodDisruptionBudget", "NetworkPolicy")
ZONE = "topology.kubernetes.io/zone"
SPREAD = {"topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}
PLACED = {
    "gpu": {"resourceName": "nvidia.com/mig-3g.40gb", "count": 2, "product": "NVIDIA-H200"},
    "scheduling": {
        "nodeSelector": {"pool": "serving"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
        ],
        "topologySpreadConstraints": [SPREAD, {"topologyKey": ZONE}],
        "priorityClassName": "serving",
    },
}


class Clock:
    """The real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        return time.time() + self.added


async def is_served(bare_api: KubernetesApi, kind: str) -> bool:
    with contextlib.suppress(ClusterError):
        await bare_api.list(kind, "default")
        return True
    return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster(bare_api: KubernetesApi, clock: Clock) -> KubernetesCluster:
    return KubernetesCluster(
        bare_api,
        runtime_image="runtime:1",
        gateway_image="gateway:1",
        operator_namespace="headway-system",
        monitoring_namespace="monitoring",
        image_pull_secrets=["mirror"],
        clock=clock,
    )


@pytest.fixture
async def key(bare_api: KubernetesApi, request: pytest.FixtureRequest) -> ServiceKey:
    namespace = f"t{abs(hash(request.node.name)) % 10**9}"
    await bare_api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    spec = {
        "model": {"source": "hf://org/name", "revision": "v1"},
        "slo": {"ttftMilliseconds": 300},
        "replicas": 2,
        **PLACED,
    }
    metadata = {"name": "demo", "namespace": namespace}
    service = {"apiVersion": "serving.headway.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata}
    await bare_api.create({**service, "spec": spec})
    return ServiceKey(namespace, "demo")


@pytest.fixture
async def take_pass(
    cluster: KubernetesCluster, key: ServiceKey, clock: Clock
) -> AsyncIterator[Callable[[], Awaitable[Outcome]]]:
    keys, carried = AdminKeys.generate(), Carried()
    async with Scraper(keys, clock) as scraper:

        async def step() -> Outcome:
            manifest = await cluster.fetch(key)
            assert manifest is not None
            return await reconcile(World(cluster, scraper, keys, clock), manifest, carried)

        yield step


async def around(
    bare_api: KubernetesApi, key: ServiceKey, kinds: tuple[str, ...] = AROUND
) -> dict[str, Json]:
    found = {kind: await bare_api.get(kind, key.namespace, "demo") for kind in kinds}
    return {kind: manifest for kind, manifest in found.items() if manifest is not None}


async def ask_for(bare_api: KubernetesApi, key: ServiceKey, **spec: Any) -> None:
    assert await bare_api.patch("InferenceService", key.namespace, "demo", {"spec": spec}) is not None


async def test_the_pods_are_taken_as_they_are_placed(
    bare_api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    outcome = await take_pass()
    assert outcome.problems == []
    deployment = await bare_api.get("Deployment", key.namespace, outcome.status["revision"]["name"])
    assert deployment is not None
    pod = deployment["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "serving", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert [one.get("effect") for one in pod["tolerations"]] == [None, "NoExecute"]
    assert [one["maxSkew"] for one in pod["topologySpreadConstraints"]] == [1, 1]
    assert pod["topologySpreadConstraints"][0]["minDomains"] == 2
    assert (pod["priorityClassName"], pod["imagePullSecrets"]) == ("serving", [{"name": "mirror"}])
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "2"}
    assert container["args"][1] == "hf://org/name@v1"


async def test_what_stands_around_pods_is_made_once_repaired_and_pruned(
    bare_api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    assert (await take_pass()).problems == []
    made = await around(bare_api, key)
    assert set(made) == set(AROUND)
    cluster._applied.clear()  # a minute later
    assert (await take_pass()).problems == []
    again = await around(bare_api, key)
    for kind in AROUND:
        assert again[kind]["metadata"]["resourceVersion"] == made[kind]["metadata"]["resourceVersion"], kind
    await bare_api.patch("NetworkPolicy", key.namespace, "demo", {"spec": {"egress": [{}]}})
    await bare_api.delete("PodDisruptionBudget", key.namespace, "demo")
    cluster._applied.clear()
    await take_pass()
    repaired = await around(bare_api, key)
    assert repaired["NetworkPolicy"]["spec"] == made["NetworkPolicy"]["spec"]
    assert repaired["PodDisruptionBudget"]["spec"] == made["PodDisruptionBudget"]["spec"]
    await ask_for(bare_api, key, replicas=1)
    await take_pass()
    assert set(await around(bare_api, key)) == {"NetworkPolicy"}
    await ask_for(bare_api, key, networkPolicy={"enabled": False})
    await take_pass()
    assert await around(bare_api, key) == {}


async def test_a_policy_of_someone_else_is_not_fought_over(
    bare_api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    foreign = {"metadata": {"name": "demo", "namespace": key.namespace}, "spec": {"podSelector": {}}}
    await bare_api.create({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **foreign})
    outcome = await take_pass()
    assert [one.step for one in outcome.problems] == ["apply NetworkPolicy demo"]
    found = await around(bare_api, key)
    assert found["NetworkPolicy"]["spec"]["podSelector"] == {}
    assert "PodDisruptionBudget" in found


@functools.cache
def monitoring_definitions() -> dict[str, Json]:
    """The Prometheus operator's own definitions, by kind."""
    found = definitions(MONITORING, read_settings().cache)
    return {one["spec"]["names"]["kind"]: one for one in found}


async def test_monitors_follow_the_kinds_that_the_cluster_has(
    bare_api: KubernetesApi, key: ServiceKey, take_pass: Any, clock: Clock, cluster: KubernetesCluster
) -> None:
    kinds = tuple(MONITORING_KINDS)
    assert (await take_pass()).problems == []
    assert cluster.site.optional_kinds == frozenset()
    for kind in kinds:
        await bare_api._call("POST", CRD_PATH, body=monitoring_definitions()[kind])
    for kind in kinds:
        await eventually(lambda kind=kind: is_served(bare_api, kind))  # type: ignore[misc]
    assert (await take_pass()).problems == []  # it has asked a moment ago
    assert cluster.site.optional_kinds == frozenset()
    clock.added += ASK_AGAIN_SECONDS
    assert (await take_pass()).problems == []
    made = await around(bare_api, key, kinds)
    assert set(made) == set(kinds)
    rules = made["PrometheusRule"]["spec"]["groups"][0]["rules"]
    assert {rule["labels"]["target"] for rule in rules} == {"ttft"}

    await ask_for(bare_api, key, monitoring={"enabled": False})
    assert (await take_pass()).problems == []
    assert await around(bare_api, key, kinds) == {}
    await ask_for(bare_api, key, monitoring=None)
    assert (await take_pass()).problems == []
    assert set(await around(bare_api, key, kinds)) == set(kinds)

    for kind in kinds:
        await bare_api._call("DELETE", f"{CRD_PATH}/{monitoring_definitions()[kind]['metadata']['name']}")
    for kind in kinds:
        await eventually(lambda kind=kind: is_gone(bare_api, kind))  # type: ignore[misc]
    outcome = await take_pass()  # before it asks again
    assert outcome.problems == []
    assert cluster.site.optional_kinds == frozenset()
    assert set(await around(bare_api, key)) == set(AROUND)


async def is_gone(bare_api: KubernetesApi, kind: str) -> bool:
    return not await is_served(bare_api, kind)


def placed(**scheduling: Any) -> Json:
    return {"scheduling": scheduling}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        pytest.param(PLACED, None, id="all of it"),
        pytest.param({"model": {"source": "hf://a/b", "revision": "refs/pr/3"}}, None, id="a revision"),
        pytest.param(
            {"model": {"source": "hf://a/b@x", "revision": "y"}}, "remove revision", id="two revisions"
        ),
        pytest.param({"model": {"source": "/a", "revision": "y"}}, "remove revision", id="of a folder"),
        pytest.param(
            {"model": {"source": "hf://a/b", "revision": "a..b"}}, "without -- and ..", id="a way up"
        ),
        pytest.param({"slo": {"windowSeconds": 30}}, None, id="a short window"),
        pytest.param({"slo": {"windowSeconds": 301}}, "windowSeconds", id="a long window"),
        pytest.param({"gpu": {}, "tensorParallelSize": 8}, None, id="GPUs by default"),
        pytest.param({"gpu": {}, "device": "cpu"}, "remove gpu, or set device", id="a GPU for a CPU"),
        pytest.param({"gpu": {"count": 2}, "tensorParallelSize": 4}, "raise gpu.count", id="too few"),
        pytest.param(
            {"gpu": {}, "resources": {"limits": {"nvidia.com/gpu": 1}}}, "both say how many", id="said twice"
        ),
        pytest.param({"gpu": {}, "resources": {"limits": {"cpu": 1}}}, None, id="beside a limit"),
        pytest.param(
            {"gpu": {"product": "a"}, "scheduling": {"nodeSelector": {"nvidia.com/gpu.product": "b"}}},
            "set one of the two",
            id="two kinds",
        ),
        pytest.param({"gpu": {"resourceName": "gpu"}}, "gpu.resourceName", id="no domain"),
        pytest.param(placed(tolerations=[{"value": "a"}]), "needs a key", id="no key"),
        pytest.param(
            placed(tolerations=[{"operator": "Exists", "value": "a"}]), "remove value", id="a value"
        ),
        pytest.param(
            placed(tolerations=[{"key": "a", "tolerationSeconds": 1}]), "for effect NoExecute", id="no effect"
        ),
        pytest.param(
            placed(topologySpreadConstraints=[{"topologyKey": "a"}] * 2),
            "Duplicate value",
            id="a label twice",
        ),
        pytest.param(
            placed(topologySpreadConstraints=[{"topologyKey": "a", "minDomains": 2}]),
            "minDomains",
            id="parts",
        ),
        pytest.param(placed(nodeSelector={"a": "b c"}), "nodeSelector", id="no label's value"),
        pytest.param({"disruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable", id="nothing may go"),
        pytest.param(
            {"monitoring": {"scrapeIntervalSeconds": 1}}, "scrapeIntervalSeconds", id="all the time"
        ),
    ],
)
async def test_the_api_server_holds_placement_to_its_rules(
    bare_api: KubernetesApi, fields: Json, complaint: str | None
) -> None:
    create = created_dry(bare_api, {"model": {"source": "bundled://headway-tiny"}, "replicas": 1} | fields)
    if complaint is None:
        await create
        return
    with pytest.raises(ClusterError, match=complaint):
        await create


async def test_defaults_are_filled_in_by_the_api_server(bare_api: KubernetesApi) -> None:
    made = await created_dry(bare_api, {"model": {"source": "/a"}, "replicas": 1, "gpu": {}, **placed()})
    spec = made["spec"]
    assert spec["networkPolicy"] == {"enabled": True}
    assert spec["disruptionBudget"] == {"enabled": True, "maxUnavailable": 1}
    assert spec["monitoring"] == {"enabled": True, "scrapeIntervalSeconds": 15}
    assert spec["gpu"] == {"resourceName": "nvidia.com/gpu", "productLabel": "nvidia.com/gpu.product"}
    assert spec["scheduling"] == {}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("", ["FIELDS:", "A large language model to serve, with the latency"]),
        ("spec", ["What to serve, how fast", "scheduling", "networkPolicy"]),
        ("spec.model.revision", ["<string>", "Branch, tag or commit of an hf:// source"]),
        ("spec.scheduling.topologySpreadConstraints.maxSkew", ["<integer>", "(1 to 1000). Default 1."]),
        ("spec.scaling.schedule", ["<[]Object>", "as cron writes times", "such as Europe/Berlin"]),
        ("spec.nodesPerReplica", ["<integer>", "equally many on each (1 to 64)", "Default 1."]),
        ("spec.rollout", ["maxSurge", "a percentage of those wanted (0% to 100%)"]),
        ("spec.slo.endToEndMilliseconds", ["(1 to 3600000)", "Default: none."]),
        ("spec.gpu", ["resourceName", "Resource that the nodes' device plugin offers GPUs as"]),
    ],
)
async def test_kubectl_explains_the_fields(
    bare_api: KubernetesApi, api_kubeconfig: Path, field: str, words: list[str]
) -> None:
    kubectl = build(["kubernetes"], read_settings().cache)["kubectl"]
    path = ".".join(filter(None, ("inferenceservices", field)))

    async def explained() -> str:
        """Nothing while the server does not yet tell of the kind, which comes a moment after its list."""
        explain = await asyncio.create_subprocess_exec(
            *(kubectl, f"--kubeconfig={api_kubeconfig}", "explain", path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await asyncio.wait_for(explain.communicate(), FACT_SECONDS)
        return " ".join(output.decode().split()) if explain.returncode == 0 else ""

    text = await eventually(explained)
    for word in words:
        assert word in text

"""Uninstalled, and installed again under another name in another namespace, by helm; an API server, no node.

The definitions stay at uninstall and remember whose they were, so that helm lets no other release have them
unless it is told to. Either way the new operator takes up the services that are there, and touches no pod of
theirs.
"""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.binaries import build
from e2e.cluster.settings import read_settings
from e2e.conftest import CRD_PATH
from e2e.installation import CHART
from e2e.test_api_chart import output_of
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.keys import AdminKeys
from headway_operator.passes import Carried, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

Json = dict[str, Any]
FIRST, SECOND = ("headway", "first-system"), ("serving", "second-system")
OF_A_RELEASE = "meta.helm.sh/release-name"


class Helm:
    """The chart as a person installs it; nothing waits for pods, since no node runs any."""

    def __init__(self, kubeconfig: Path) -> None:
        self._command = build(["helm"], read_settings().cache)["helm"], f"--kubeconfig={kubeconfig}"

    async def install(self, release: tuple[str, str], *flags: str) -> None:
        """release: its name and namespace. AssertionError with helm's words where it refuses."""
        name, namespace = release
        where = (f"--namespace={namespace}", "--create-namespace")
        await output_of(*self._command, "install", name, CHART, *where, *flags)

    async def upgrade(self, release: tuple[str, str]) -> None:
        name, namespace = release
        flags = (f"--namespace={namespace}", "--reset-then-reuse-values")
        await output_of(*self._command, "upgrade", name, CHART, *flags)

    async def uninstall(self, release: tuple[str, str]) -> None:
        await output_of(*self._command, "uninstall", release[0], f"--namespace={release[1]}")


async def owners(api: KubernetesApi) -> set[str | None]:
    """Which release each of our definitions says it is of."""
    items = (await api._call("GET", CRD_PATH) or {})["items"]
    ours = [one["metadata"] for one in items if one["spec"]["group"] == "serving.headway.dev"]
    assert len(ours) == 2
    return {one.get("annotations", {}).get(OF_A_RELEASE) for one in ours}


async def taken_up(api: KubernetesApi, key: ServiceKey, namespace: str) -> None:
    """What an operator that was just installed in `namespace` does with the service, with keys of its own."""
    cluster = KubernetesCluster(
        api, runtime_image="runtime:1", gateway_image="gateway:1", operator_namespace=namespace
    )
    keys, carried = AdminKeys.generate(), Carried()
    async with Scraper(keys, time.time) as scraper:
        for _ in range(2):
            manifest = await cluster.fetch(key)
            assert manifest is not None
            outcome = await reconcile(World(cluster, scraper, keys, time.time), manifest, carried)
            assert outcome.problems == []


async def what_serves(api: KubernetesApi, key: ServiceKey) -> Json:
    """The service as its user wrote it, its pods whole, and what Deployments make pods from."""
    service = await api.get("InferenceService", key.namespace, key.name)
    assert service is not None
    deployments = await api.list("Deployment", key.namespace)
    pods = await api.list("Pod", key.namespace)
    assert len(deployments) == 2
    assert pods
    return {
        "service": (service["metadata"]["uid"], service["metadata"]["generation"], service["spec"]),
        "revision": service["status"]["revision"]["name"],
        "templates": {one["metadata"]["name"]: one["spec"]["template"] for one in deployments},
        "pods": {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in pods},
    }


@pytest.fixture
async def helm(kubeconfig: Path, api: KubernetesApi, key: ServiceKey) -> AsyncIterator[Helm]:
    """A cluster in which the chart was installed and served, and from which it was removed again."""
    running = Helm(kubeconfig)
    # The definitions are there, from `api`, and of no release.
    await running.install(FIRST, "--take-ownership")
    await taken_up(api, key, FIRST[1])
    [replicas] = [
        one
        for one in await api.list("Deployment", key.namespace)
        if one["metadata"]["name"] != "demo-gateway"
    ]
    template = replicas["spec"]["template"]
    await api.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "demo-0", "namespace": key.namespace, **template["metadata"]},
            "spec": template["spec"],
        }
    )
    await running.uninstall(FIRST)
    assert await owners(api) == {FIRST[0]}
    yield running
    await running.uninstall(SECOND)
    assert len(await api.list("InferenceService", key.namespace)) == 1


async def test_another_release_takes_the_definitions_over_when_it_is_told_to(
    helm: Helm, api: KubernetesApi, key: ServiceKey
) -> None:
    before = await what_serves(api, key)
    with pytest.raises(AssertionError, match="invalid ownership metadata"):
        await helm.install(SECOND)
    await helm.install(SECOND, "--take-ownership")
    assert await owners(api) == {SECOND[0]}
    await taken_up(api, key, SECOND[1])
    assert await what_serves(api, key) == before
    # From here on they are its own.
    await helm.upgrade(SECOND)
    assert await what_serves(api, key) == before


async def test_another_release_leaves_the_definitions_as_they_are_when_they_are_not_its_own(
    helm: Helm, api: KubernetesApi, key: ServiceKey
) -> None:
    before = await what_serves(api, key)
    await helm.install(SECOND, "--set=crds.enabled=false")
    assert await owners(api) == {FIRST[0]}
    await taken_up(api, key, SECOND[1])
    assert await what_serves(api, key) == before


async def test_definitions_that_were_written_over_to_a_release_are_its_own(
    helm: Helm, kubeconfig: Path, api: KubernetesApi, key: ServiceKey
) -> None:
    """What a helm needs that does not know --take-ownership."""
    before = await what_serves(api, key)
    name, namespace = SECOND
    marks = (f"{OF_A_RELEASE}={name}", f"meta.helm.sh/release-namespace={namespace}")
    kinds = ("inferenceservices.serving.headway.dev", "modelcaches.serving.headway.dev")
    kubectl = build(["kubernetes"], read_settings().cache)["kubectl"]
    await output_of(kubectl, f"--kubeconfig={kubeconfig}", "annotate", "crd", *kinds, "--overwrite", *marks)
    await helm.install(SECOND)
    assert await owners(api) == {name}
    await taken_up(api, key, namespace)
    assert await what_serves(api, key) == before

"""Every golden child is taken by a real API server, with the definitions that other projects publish."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.definitions import LEADER_WORKER_SET, MONITORING, definitions
from e2e.cluster.settings import read_settings
from e2e.conftest import CRD_PATH, eventually
from e2e.test_api_children import is_served
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_paths import path_of
from headway_operator.errors import ClusterError
from headway_operator.manifests.last_applied import holds
from headway_operator.names import OPTIONAL_KINDS, REVISION_KINDS

Json = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "tests" / "operator" / "golden"
# Children of processes on one machine, and a part of a pod.
LEFT_OUT = ("local.yaml", "placed.yaml")
FILES = sorted(path.name for path in GOLDEN.glob("*.yaml") if path.name not in LEFT_OUT)
NAMESPACE = "golden"


@pytest.fixture
async def server(api: KubernetesApi) -> KubernetesApi:
    """With each kind that is optional, and a namespace."""
    cache = read_settings().cache
    for definition in (*definitions(LEADER_WORKER_SET, cache), *definitions(MONITORING, cache)):
        path = f"{CRD_PATH}/{definition['metadata']['name']}"
        if not await api._call("GET", path, absent_is_none=True):
            await api._call("POST", CRD_PATH, body=definition)
    for kind in OPTIONAL_KINDS:
        await eventually(lambda kind=kind: is_served(api, kind))  # type: ignore[misc]
    if not await api._call("GET", f"/api/v1/namespaces/{NAMESPACE}", absent_is_none=True):
        await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": NAMESPACE}})
    return api


def children(name: str) -> Iterator[Json]:
    for child in yaml.safe_load_all((GOLDEN / name).read_text()):
        child["metadata"]["namespace"] = NAMESPACE
        for subject in child.get("subjects", ()):
            subject["namespace"] = NAMESPACE
        yield child


async def ask(api: KubernetesApi, child: Json) -> Json | None:
    """What would be made of it: unknown and doubled fields are errors, and nothing is kept."""
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    return await api._call("POST", path_of(child["kind"], NAMESPACE), query=query, body=child)


@pytest.mark.parametrize("name", FILES)
async def test_golden_children_are_taken_without_a_complaint(server: KubernetesApi, name: str) -> None:
    seen = 0
    for child in children(name):
        made = await ask(server, child)
        # What the API server fills in and rewrites is not taken for somebody's change.
        assert child["kind"] not in REVISION_KINDS or holds(made, child)
        seen += 1
    assert seen


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("PodMonitor.yaml", "PodMonitor", lambda spec: spec.update(selektor={})),
        ("PrometheusRule.yaml", "PrometheusRule", lambda spec: spec["groups"][0].pop("name")),
        ("several-nodes.yaml", "LeaderWorkerSet", lambda spec: spec.update(replicas="two")),
        ("smallest.yaml", "Deployment", lambda spec: spec["template"]["spec"].update(container=[])),
    ],
)
async def test_a_field_that_is_wrong_is_refused(
    server: KubernetesApi, name: str, kind: str, change: Any
) -> None:
    child = next(one for one in children(name) if one["kind"] == kind)
    change(child["spec"])
    with pytest.raises(ClusterError):
        await ask(server, child)

"""What others write into a child: what Headway sets is changed back, what they add stays. Needs no node."""

from typing import Any

from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_paths import API_VERSIONS
from headway_operator.state import ServiceKey

Json = dict[str, Any]
# As `kubectl rollout restart` writes it.
RESTARTED = {"kubectl.kubernetes.io/restartedAt": "2026-01-02T03:04:05Z"}


async def template_of(api: KubernetesApi, key: ServiceKey, revision: str) -> Json:
    deployment = await api.get("Deployment", key.namespace, revision)
    assert deployment is not None
    template: Json = deployment["spec"]["template"]
    return template


async def test_what_others_add_to_a_child_stays_and_what_headway_sets_is_changed_back(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster, take_pass: Any
) -> None:
    revision = (await take_pass()).status["revision"]["name"]
    before = await template_of(api, key, revision)
    [own] = before["spec"]["containers"]
    added = {"name": "ADDED", "value": "1"}
    container = {"name": own["name"], "image": "another:1", "env": [added]}
    path = f"/apis/{API_VERSIONS['Deployment']}/namespaces/{key.namespace}/deployments/{revision}"
    await api._call(
        "PATCH",
        path,
        query={"fieldManager": "somebody"},
        body={
            "spec": {
                "template": {"metadata": {"annotations": RESTARTED}, "spec": {"containers": [container]}}
            }
        },
        content_type="application/strategic-merge-patch+json",
    )
    cluster._applied.clear()  # a minute later
    outcome = await take_pass()
    assert outcome.problems == []
    assert outcome.status["revision"]["name"] == revision
    after = await template_of(api, key, revision)
    assert RESTARTED.items() <= after["metadata"]["annotations"].items()
    [kept] = after["spec"]["containers"]
    assert kept["image"] == own["image"]
    assert sorted(kept["env"], key=str) == sorted([*own.get("env", []), added], key=str)
    assert kept["args"] == own["args"]


async def test_an_annotation_in_the_template_is_a_new_revision_beside_the_one_that_serves(
    api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    first = (await take_pass()).status["revision"]["name"]
    annotation = {"example.com/restarted": "2026-01-02"}
    change = {"spec": {"template": {"metadata": {"annotations": annotation}}}}
    assert await api.patch("InferenceService", key.namespace, key.name, change) is not None
    second = (await take_pass()).status["revision"]["name"]
    assert second != first
    assert annotation.items() <= (await template_of(api, key, second))["metadata"]["annotations"].items()
    assert await template_of(api, key, first)

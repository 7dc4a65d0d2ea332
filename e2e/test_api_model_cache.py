"""ModelCaches on a real API server without a node: rules, children, what Jobs come to, and who is woken.

The pods and the ends of Jobs are written by the tests, as a kubelet and the Job controller would.
"""

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import eventually
from e2e.operator_process import running_operator
from headway_operator.cache_pass import take_cache_pass
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_model_caches import KubernetesModelCaches
from headway_operator.errors import ClusterError
from headway_operator.manifests.fetch_job import CLAIM_MOUNT
from headway_operator.names import API_VERSION, CACHE_KIND, CLAIM, CacheKey
from headway_operator.passes import Carried, Outcome
from headway_operator.state import ServiceKey

Json = dict[str, Any]
NAME = "llama"
MADE = "llama-model-cache"
MOMENT = "2026-01-02T03:04:05Z"
MADE_STORAGE = {"size": "10Gi", "storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}
FETCHED = {
    "schema_version": 1,
    "folder": f"{CLAIM_MOUNT}/models--org--name/snapshots/0a1b",
    "identity": "0a1b",
    "bytes": 5_000_000,
    "files": 4,
}
REFUSED = {"schema_version": 1, "error": "SourceRefusedError", "message": "the token does not open it"}
TakePass = Callable[[], Awaitable[Outcome]]


def body(where: str, **spec: Any) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": CACHE_KIND,
        "metadata": {"name": NAME, "namespace": where},
        "spec": {"source": "hf://org/name", "storage": {"size": "10Gi"}, **spec},
    }


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        pytest.param({}, None, id="the least"),
        pytest.param({"storage": MADE_STORAGE, "revision": "v1"}, None, id="a claim that is made"),
        pytest.param({"storage": {"claimName": "shelf"}}, None, id="a claim that exists"),
        pytest.param({"source": "pvc://claim/a"}, "must be one that is fetched", id="nothing to fetch"),
        pytest.param({"source": "s3://b/x"}, "must be one that is fetched", id="no form"),
        pytest.param({"source": "s3://bucket/x", "revision": "v1"}, "remove revision", id="no revisions"),
        pytest.param({"storage": {}}, "set either claimName or size", id="no claim"),
        pytest.param({"storage": {"claimName": "a", "size": "1Gi"}}, "set either", id="two claims"),
        pytest.param(
            {"storage": {"claimName": "a", "storageClassName": "b"}}, "remove them", id="a class of another"
        ),
        pytest.param(
            {"storage": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}, "can be written", id="read only"
        ),
        pytest.param({"storage": {"size": "a lot"}}, "storage.size", id="no quantity"),
        pytest.param({"refresh": ""}, "refresh", id="an empty refresh"),
    ],
)
async def test_the_api_server_holds_caches_to_their_rules(
    api: KubernetesApi, spec: Json, complaint: str | None
) -> None:
    path = f"/apis/{API_VERSION}/namespaces/default/modelcaches"

    async def create() -> None:
        await api._call("POST", path, query={"dryRun": "All"}, body=body("default", **spec))

    if complaint is None:
        await create()
        return
    with pytest.raises(ClusterError, match=complaint):
        await create()


@pytest.mark.parametrize(
    ("storage", "complaint"),
    [
        pytest.param({"size": "20Gi"}, None, id="larger"),
        pytest.param({"size": "5Gi"}, "shrinks no claim", id="smaller"),
        pytest.param({"storageClassName": "slow"}, "keeps its class", id="another class"),
        pytest.param({"storageClassName": None}, "keeps its class", id="no class"),
        pytest.param({"accessModes": ["ReadWriteMany"]}, "keeps its class", id="other modes"),
        pytest.param(
            {"size": None, "storageClassName": None, "accessModes": None, "claimName": "a"},
            "keeps its class",
            id="another claim",
        ),
    ],
)
async def test_a_claim_that_was_made_stays_what_it_is(
    api: KubernetesApi, key: ServiceKey, storage: Json, complaint: str | None
) -> None:
    await api.create(body(key.namespace, storage=MADE_STORAGE))
    if complaint is None:
        assert await api.patch(CACHE_KIND, key.namespace, NAME, {"spec": {"storage": storage}}) is not None
        return
    with pytest.raises(ClusterError, match=complaint):
        await api.patch(CACHE_KIND, key.namespace, NAME, {"spec": {"storage": storage}})


@pytest.fixture
def caches(api: KubernetesApi, cluster: KubernetesCluster) -> KubernetesModelCaches:
    return KubernetesModelCaches(api, lambda: cluster.site)


@pytest.fixture
async def cache_pass(caches: KubernetesModelCaches, key: ServiceKey) -> TakePass:
    """One pass over the cache as the API server has it now."""
    carried, cache_key = Carried(), CacheKey(key.namespace, NAME)

    async def step() -> Outcome:
        found = await caches.fetch(cache_key)
        assert found is not None
        return await take_cache_pass(caches, time.time, found, carried)

    return step


def condition(status: Any, kind: str = "Ready") -> tuple[str, str]:
    return next((c["status"], c["reason"]) for c in status["conditions"] if c["type"] == kind)


def message(status: Any, kind: str = "Ready") -> str:
    return str(next(c["message"] for c in status["conditions"] if c["type"] == kind))


async def the_job(api: KubernetesApi, key: ServiceKey) -> Json:
    [job] = await api.list("Job", key.namespace)
    return job


async def write_pod(api: KubernetesApi, job: Json, name: str, status: Json) -> None:
    """A pod of the Job, with what a kubelet would say of it."""
    template = job["spec"]["template"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"]}
    metadata = {
        "name": name,
        "namespace": job["metadata"]["namespace"],
        "labels": template["metadata"]["labels"],
        "ownerReferences": [{**owner, "uid": job["metadata"]["uid"], "controller": True}],
    }
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    await api.create(made)
    await api.patch("Pod", metadata["namespace"], name, {"status": status}, "status")


def ended(exit_code: int, told: Json) -> Json:
    terminated = {"exitCode": exit_code, "message": json.dumps(told), "finishedAt": MOMENT}
    container = {"name": "runtime", "image": "a", "imageID": "", "ready": False, "restartCount": 0}
    phase = "Failed" if exit_code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{**container, "state": {"terminated": terminated}}]}


async def end_job(api: KubernetesApi, job: Json, *, failed: int = 0) -> None:
    kinds = ("FailureTarget", "Failed") if failed else ("SuccessCriteriaMet", "Complete")
    facts = {"status": "True", "reason": "Ended", "message": "it ended", "lastTransitionTime": MOMENT}
    status: Json = {"startTime": MOMENT, "conditions": [{"type": kind, **facts} for kind in kinds]}
    status |= {"failed": failed} if failed else {"succeeded": 1, "completionTime": MOMENT}
    metadata = job["metadata"]
    changed = await api.patch("Job", metadata["namespace"], metadata["name"], {"status": status}, "status")
    assert changed is not None


async def test_a_pass_makes_owned_children_and_ends_in_what_is_fetched(
    api: KubernetesApi, key: ServiceKey, cache_pass: TakePass, caches: KubernetesModelCaches
) -> None:
    made = await api.create(body(key.namespace, storage=MADE_STORAGE))
    outcome = await cache_pass()
    assert (outcome.problems, condition(outcome.status)) == ([], ("False", "ClaimPending"))
    claim = await api.get(CLAIM, key.namespace, MADE)
    assert claim is not None
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert (await cache_pass()).problems == []
    job = await the_job(api, key)
    policy = await api.get("NetworkPolicy", key.namespace, "llama-fetch")
    assert policy is not None
    for child in (claim, job, policy):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == (CACHE_KIND, made["metadata"]["uid"])

    # Nothing is written again that nobody changed; once, as the first of all writes stores it otherwise.
    versions: list[list[str]] = []
    for _ in range(3):
        caches._applied.clear()
        status = (await cache_pass()).status
        found = [await api.get(CLAIM, key.namespace, MADE), await the_job(api, key)]
        versions.append([one["metadata"]["resourceVersion"] for one in found if one is not None])
    assert versions[1] == versions[2]
    assert status == (await cache_pass()).status

    await write_pod(api, job, "llama-one", ended(3, REFUSED))
    outcome = await cache_pass()
    assert condition(outcome.status) == ("False", "SourceRefused")
    assert condition(outcome.status, "Degraded") == ("True", "SourceRefused")
    assert "the token does not open it" in message(outcome.status)
    await write_pod(api, job, "llama-two", ended(0, FETCHED))
    await end_job(api, job)
    outcome = await cache_pass()
    assert condition(outcome.status) == ("True", "Fetched")
    written = await api.get(CACHE_KIND, key.namespace, NAME)
    assert written is not None
    assert written["status"]["fetched"] | {"key": "", "claimUid": "", "fetchedAt": "", "seconds": 0} == {
        "key": "",
        "source": "hf://org/name",
        "claimName": MADE,
        "claimUid": "",
        "path": "models--org--name/snapshots/0a1b",
        "identity": "0a1b",
        "bytes": 5_000_000,
        "files": 4,
        "fetchedAt": "",
        "seconds": 0,
    }
    assert written["status"]["display"] == {"size": "5 MB", "progress": "100%"}
    events = {one["reason"] for one in await api.list("Event", key.namespace)}
    assert {"ClaimPending", "SourceRefused", "Fetched"} <= events


async def test_another_revision_takes_the_place_of_the_job_and_not_of_what_is_there(
    api: KubernetesApi, key: ServiceKey, cache_pass: TakePass
) -> None:
    await api.create(body(key.namespace))
    await cache_pass()
    await cache_pass()
    first = await the_job(api, key)
    await write_pod(api, first, "llama-one", ended(0, FETCHED))
    await end_job(api, first)
    await cache_pass()
    await api.patch(CACHE_KIND, key.namespace, NAME, {"spec": {"revision": "v2"}})
    outcome = await cache_pass()
    assert (outcome.problems, condition(outcome.status)) == ([], ("False", "Fetching"))
    second = await the_job(api, key)
    assert second["metadata"]["name"] != first["metadata"]["name"]
    assert second["spec"]["template"]["spec"]["containers"][0]["args"][1] == "hf://org/name@v2"
    assert outcome.status["fetched"]["identity"] == "0a1b"
    await api.patch(CACHE_KIND, key.namespace, NAME, {"spec": {"suspend": True}})
    outcome = await cache_pass()
    assert condition(outcome.status) == ("False", "Suspended")
    assert await api.list("Job", key.namespace) == []


async def test_what_is_in_the_way_is_told(api: KubernetesApi, key: ServiceKey, cache_pass: TakePass) -> None:
    await api.create(body(key.namespace, storage={"claimName": "shelf"}))
    outcome = await cache_pass()
    assert condition(outcome.status) == ("False", "ClaimMissing")
    assert "make it, or change spec.storage.claimName" in message(outcome.status)


async def test_a_claim_of_somebody_else_is_not_taken(
    api: KubernetesApi, key: ServiceKey, cache_pass: TakePass
) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    foreign = {"apiVersion": "v1", "kind": CLAIM, "metadata": {"name": MADE, "namespace": key.namespace}}
    await api.create({**foreign, "spec": spec})
    await api.create(body(key.namespace))
    outcome = await cache_pass()
    assert [one.step for one in outcome.problems] == [f"apply {CLAIM} {MADE}"]
    assert condition(outcome.status, "Degraded") == ("True", "ObjectConflict")


async def deployments(api: KubernetesApi, key: ServiceKey) -> list[Json]:
    found = await api.list("Deployment", key.namespace)
    return [one for one in found if one["metadata"]["name"] != "demo-gateway"]


async def ask_for(api: KubernetesApi, key: ServiceKey, **spec: Any) -> None:
    assert await api.patch("InferenceService", key.namespace, "demo", {"spec": spec}) is not None


async def test_a_service_waits_for_its_cache_and_goes_on_as_it_was(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cache_pass: TakePass
) -> None:
    await take_pass()
    [before] = await deployments(api, key)
    await ask_for(api, key, model={"source": f"cache://{NAME}"})
    outcome = await take_pass()
    assert outcome.problems == []
    assert condition(outcome.status, "ModelAvailable") == ("False", "ModelCacheMissing")
    assert condition(outcome.status, "Degraded") == ("True", "ModelCacheMissing")
    assert [one["metadata"]["name"] for one in await deployments(api, key)] == [before["metadata"]["name"]]
    assert outcome.status["revision"]["name"] == before["metadata"]["name"]

    await api.create(body(key.namespace))
    await cache_pass()
    await cache_pass()
    outcome = await take_pass()
    assert condition(outcome.status, "ModelAvailable") == ("False", "ModelCacheFetching")
    assert len(await deployments(api, key)) == 1
    job = await the_job(api, key)
    await write_pod(api, job, "llama-one", ended(0, FETCHED))
    await end_job(api, job)
    assert condition((await cache_pass()).status) == ("True", "Fetched")
    outcome = await take_pass()
    assert outcome.problems == []
    [made] = [
        one for one in await deployments(api, key) if one["metadata"]["uid"] != before["metadata"]["uid"]
    ]
    pod = made["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][1] == "/mnt/models/models--org--name/snapshots/0a1b"
    [volume] = [one for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert volume["persistentVolumeClaim"] == {"claimName": MADE, "readOnly": True}
    assert condition(outcome.status, "ModelAvailable")[1] not in ("ModelCacheMissing", "ModelCacheFetching")


async def test_a_new_service_without_its_cache_has_all_but_replicas(
    api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    await ask_for(api, key, model={"source": f"cache://{NAME}"}, quality={}, quantization="int8")
    outcome = await take_pass()
    assert outcome.problems == []
    assert condition(outcome.status) == ("False", "ModelCacheMissing")
    assert condition(outcome.status, "QualityVerified") == ("Unknown", "AwaitingModel")
    assert await deployments(api, key) == []
    assert await api.get("Deployment", key.namespace, "demo-gateway") is not None
    assert "revision" not in outcome.status


async def test_services_are_woken_when_their_cache_is_filled_and_when_it_goes(
    api: KubernetesApi, key: ServiceKey, kubeconfig: Path
) -> None:
    """By a running operator, whose clock ticks too slowly to be the cause."""
    await ask_for(api, key, model={"source": f"cache://{NAME}"})

    async def said(kind: str) -> Any:
        found = await api.get("InferenceService", key.namespace, "demo")
        status = (found or {}).get("status") or {}
        return [one["reason"] for one in status.get("conditions") or () if one["type"] == kind]

    async with running_operator(kubeconfig, key.namespace, "--interval-seconds", "300") as operator:
        await eventually(lambda: _is(said("ModelAvailable"), ["ModelCacheMissing"]))
        await api.create(body(key.namespace))
        await eventually(lambda: _is(said("ModelAvailable"), ["ModelCacheFetching"]))
        [job] = await eventually(lambda: api.list("Job", key.namespace))
        await write_pod(api, job, "llama-one", ended(0, FETCHED))
        await end_job(api, job)
        await eventually(lambda: deployments(api, key))
        page = await operator.metrics()
        labels = f'{{name="{NAME}",namespace="{key.namespace}"}}'
        assert f"headway_model_cache_ready{labels} 1.0" in page
        assert f"headway_model_cache_bytes{labels} 5e+06" in page
        found = await api.get(CACHE_KIND, key.namespace, NAME)
        assert found is not None
        assert found["status"]["services"] == ["demo"]
        await api.delete(CACHE_KIND, key.namespace, NAME)
        await eventually(lambda: _is(said("ModelAvailable"), ["ModelCacheMissing"]))
        assert len(await deployments(api, key)) == 1

        async def is_forgotten() -> bool:
            return "headway_model_cache_ready{" not in await operator.metrics()

        await eventually(is_forgotten)


async def _is(fact: Awaitable[Any], wanted: Any) -> bool:
    return bool(await fact == wanted)

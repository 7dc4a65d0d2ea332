"""`spec.quality` against a real API server without a node: the Job, its verdict, and what waits for it."""

import time
from typing import Any

import pytest

from e2e.api_objects import Json, condition, no_pods, pod, status
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError
from headway_operator.keys import AdminKeys
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

JUDGED = {"quantization": "int8", "quality": {"text": "configmap://judge/text.jsonl"}}
VERDICT = (
    '{"schema_version":1,"passed":%s,"checks":[{"name":"mean KL divergence","value":%s,"limit":0.01,'
    '"unit":"nats","passed":%s,"note":""}],"text":null,"tasks":[],"left_out":0}'
)
PASSED, FAILED = (
    {"exitCode": 0, "message": VERDICT % ("true", "0.0002", "true")},
    {"exitCode": 1, "reason": "Error", "message": VERDICT % ("false", "0.3", "false")},
)
MOMENT = "2026-01-02T03:04:05Z"


async def ask_for(api: KubernetesApi, key: ServiceKey, **spec: Any) -> None:
    assert await api.patch("InferenceService", key.namespace, "demo", {"spec": spec}) is not None


async def end_job(api: KubernetesApi, key: ServiceKey, terminated: Json, reason: str = "") -> str:
    """What the Job's controller and a kubelet would do: a pod that ended, and what the Job says of it."""
    (job,) = [
        one for one in await api.list("Job", key.namespace) if not one.get("status", {}).get("conditions")
    ]
    name = job["metadata"]["name"]
    made = pod(key, f"{name}-x1y2z", "evaluation")
    made["metadata"]["labels"] |= {"batch.kubernetes.io/job-name": name}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    made["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    await api.create(made)
    pod_status = status(terminated=terminated) | {
        "phase": "Failed" if terminated["exitCode"] else "Succeeded"
    }
    await api.patch("Pod", key.namespace, f"{name}-x1y2z", {"status": pod_status}, "status")
    target, end = (
        ("FailureTarget", "Failed")
        if terminated["exitCode"] or reason
        else ("SuccessCriteriaMet", "Complete")
    )
    facts = {
        "status": "True",
        "reason": reason or "Ended",
        "message": "it ended",
        "lastTransitionTime": MOMENT,
    }
    body: Json = {"startTime": MOMENT, "conditions": [{"type": kind, **facts} for kind in (target, end)]}
    body |= {"failed": 1} if end == "Failed" else {"succeeded": 1, "completionTime": MOMENT}
    assert await api.patch("Job", key.namespace, name, {"status": body}, "status") is not None
    return str(name)


async def deployments(api: KubernetesApi, key: ServiceKey) -> set[str]:
    found = {one["metadata"]["name"] for one in await api.list("Deployment", key.namespace)}
    return found - {"demo-gateway"}


async def test_nothing_is_rolled_out_before_its_job_has_passed_it(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    await ask_for(api, key, **JUDGED)
    outcome = await take_pass()
    assert condition(outcome.status, "QualityVerified")["reason"] == "FileMissing"
    assert await api.list("Job", key.namespace) == []
    judge = {
        "metadata": {"name": "judge", "namespace": key.namespace},
        "data": {"text.jsonl": '{"text": "a"}'},
    }
    await api.create({"apiVersion": "v1", "kind": "ConfigMap", **judge})
    outcome = await take_pass()
    assert outcome.problems == []
    assert condition(outcome.status, "QualityVerified")["reason"] == "Verifying"
    assert condition(outcome.status, "Ready")["reason"] == "VerifyingQuality"
    (job,) = await api.list("Job", key.namespace)
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["controller"]) == ("InferenceService", True)
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["args"][0] == "eval"
    assert (spec["restartPolicy"], spec["securityContext"]["runAsNonRoot"]) == ("Never", True)
    cluster._applied.clear()  # a minute later
    outcome = await take_pass()
    assert (outcome.problems, await deployments(api, key)) == ([], set())

    await end_job(api, key, PASSED)
    outcome = await take_pass()
    verified = condition(outcome.status, "QualityVerified")
    assert (verified["status"], verified["reason"]) == ("True", "Passed")
    assert verified["message"] == "mean KL divergence 0.0002 nats, at most 0.01 nats"
    first = outcome.status["revision"]["name"]
    assert await deployments(api, key) == {first}
    service = await cluster.fetch(key)
    assert service is not None
    assert service["status"]["quality"]["checks"][0]["value"] == pytest.approx(0.0002)
    assert service["status"]["display"]["quality"] == "passed"

    # Another one is asked for: judged beside what serves, and withheld when it fails.
    await ask_for(api, key, quantization="fp8")
    outcome = await take_pass()
    assert condition(outcome.status, "QualityVerified")["reason"] == "Verifying"
    assert [one["metadata"]["name"] for one in await api.list("Job", key.namespace)] != [
        job["metadata"]["name"]
    ]
    await end_job(api, key, FAILED)
    outcome = await take_pass()
    assert condition(outcome.status, "QualityVerified")["status"] == "False"
    assert condition(outcome.status, "Progressing")["reason"] == "QualityFailed"
    assert outcome.status["revision"]["name"] == first
    assert await deployments(api, key) == {first}


async def test_a_verdict_outlives_the_operator_and_the_job(
    api: KubernetesApi, key: ServiceKey, take_pass: Any, cluster: KubernetesCluster
) -> None:
    await ask_for(api, key, quantization="int8", quality={})
    await take_pass()
    name = await end_job(api, key, FAILED)
    # The operator that began it has gone: another one reads the verdict from the pod.
    keys, other = (
        AdminKeys.generate(),
        KubernetesCluster(api, runtime_image="runtime:1", gateway_image="gateway:1"),
    )
    async with Scraper(keys, time.time) as scraper:

        async def another_pass() -> Outcome:
            manifest = await other.fetch(key)
            assert manifest is not None
            return await reconcile(World(other, scraper, keys, time.time), manifest, Carried())

        outcome = await another_pass()
        assert condition(outcome.status, "QualityVerified")["reason"] == "Failed"
        await api.delete("Job", key.namespace, name)  # its time after the end is over
        outcome = await another_pass()
        assert condition(outcome.status, "QualityVerified")["reason"] == "Failed"
        assert await api.list("Job", key.namespace) == []
        assert await deployments(api, key) == set()


async def test_an_evaluation_without_a_verdict_is_run_again_when_its_job_is_deleted(
    api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    await ask_for(api, key, quantization="int8", quality={})
    await take_pass()
    words = "fetching\nheadway eval: could not judge: no such host\n"
    name = await end_job(api, key, {"exitCode": 2, "reason": "Error", "message": words})
    for _ in range(2):
        outcome = await take_pass()
        verified = condition(outcome.status, "QualityVerified")
        assert (verified["status"], verified["reason"]) == ("False", "JobFailed")
        assert (
            "exited with status 2; last line: headway eval: could not judge: no such host"
            in verified["message"]
        )
    await api.delete("Job", key.namespace, name)
    await api.delete("Pod", key.namespace, f"{name}-x1y2z")
    await take_pass()
    (job,) = await api.list("Job", key.namespace)
    assert job["metadata"]["name"] == name


async def test_an_evaluation_whose_pod_is_gone_with_its_verdict_is_run_again(
    api: KubernetesApi, key: ServiceKey, take_pass: Any
) -> None:
    await ask_for(api, key, quantization="int8", quality={})
    await take_pass()
    name = await end_job(api, key, PASSED)
    (first,) = await api.list("Job", key.namespace)
    await no_pods(api, key)
    outcome = await take_pass()
    verified = condition(outcome.status, "QualityVerified")
    assert (verified["status"], verified["reason"]) == ("Unknown", "VerdictLost")
    assert (outcome.problems, await deployments(api, key)) == ([], set())
    outcome = await take_pass()
    assert condition(outcome.status, "QualityVerified")["reason"] == "Verifying"
    (again,) = await api.list("Job", key.namespace)
    assert again["metadata"]["name"] == name
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    await end_job(api, key, PASSED)
    outcome = await take_pass()
    assert condition(outcome.status, "QualityVerified")["reason"] == "Passed"


@pytest.mark.parametrize(
    ("quality", "want"),
    [
        pytest.param({"text": "ftp://a/b"}, "must be bundled, none, /PATH", id="no form"),
        pytest.param({"text": "pvc://claim/../x"}, "must be bundled, none, /PATH", id="a way up"),
        pytest.param({"text": "none", "tasks": ["none"]}, "something to judge by", id="nothing"),
        pytest.param({"tasks": ["none", "bundled"]}, "none must stand alone", id="none beside others"),
        pytest.param({"thresholds": {"maxKl": "-1"}}, "maxKl", id="a limit below nothing"),
        pytest.param({"timeoutSeconds": 5}, "timeoutSeconds", id="no time"),
    ],
)
async def test_the_api_server_refuses_a_gate_that_cannot_be(
    api: KubernetesApi, key: ServiceKey, quality: Json, want: str
) -> None:
    with pytest.raises(ClusterError, match=want):
        await ask_for(api, key, quality=quality)

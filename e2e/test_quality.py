"""The gate on quality on a real cluster: a Job passes quantized weights, and stops a broken scale."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from bundled_model.quantized_copy import write_fp8_copy
from e2e.kubernetes import Kubernetes, Object, eventually
from e2e.observed_service import NAME, NAMESPACE, SERVICE_LABEL, condition, manifest, runtime_pods, status

BROKEN_SCALE = {"model.layers.1.mlp.down_proj": 3.0}
INSIDE = "/models/broken"
EVALUATION_PODS = f"{SERVICE_LABEL},serving.headway.dev/component=evaluation"
JUDGED_SECONDS = 240

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def broken() -> Iterator[Path]:
    """A checkpoint on the node that loads, answers, and answers worse."""
    folder = Path(tempfile.mkdtemp(prefix="headway-broken-"))
    write_fp8_copy(folder / "model", BROKEN_SCALE)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)  # pods run as nobody in particular
    yield folder / "model"
    shutil.rmtree(folder)


def gated(kubernetes: Kubernetes, folder: Path, **spec: Any) -> Object:
    """The service with a gate; every replica could read the broken checkpoint."""
    wanted = manifest(kubernetes)
    wanted["spec"] = {key: value for key, value in wanted["spec"].items() if key not in ("slo", "scaling")}
    limits = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    wanted["spec"] |= {"replicas": 1, "resources": limits, "quality": {"resources": limits}, **spec}
    pod = wanted["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "models", "hostPath": {"path": str(folder)}})
    [container] = pod["containers"]
    container["volumeMounts"].append({"name": "models", "mountPath": INSIDE, "readOnly": True})
    return wanted


@pytest.fixture
def on_this_machine(installed: Kubernetes) -> Kubernetes:
    if not installed.has_pod_network:
        pytest.skip("the broken checkpoint lies on this machine, which the cluster's nodes do not see")
    return installed


async def test_quantized_weights_are_judged_before_a_replica_starts(
    on_this_machine: Kubernetes, broken: Path
) -> None:
    kubernetes = on_this_machine
    kubernetes.apply(gated(kubernetes, broken, quantization="int8", kvCacheDtype="fp8"))
    await eventually("a Job judges", 30, lambda: kubernetes.list("jobs", NAMESPACE, SERVICE_LABEL))
    await eventually("that shows", 30, lambda: condition(kubernetes, "Ready") == "False VerifyingQuality")
    assert runtime_pods(kubernetes) == []
    await eventually(
        "it has passed", JUDGED_SECONDS, lambda: condition(kubernetes, "QualityVerified") == "True Passed"
    )
    [job] = kubernetes.list("jobs", NAMESPACE, SERVICE_LABEL)
    quality = status(kubernetes)["quality"]
    assert job["metadata"]["name"] == quality["job"]
    values = {check["name"]: check["value"] for check in quality["checks"]}
    print(values)
    assert 1e-5 < values["mean KL divergence"] < 2e-3
    assert len(values) == 3
    await eventually("the service is Ready", 120, lambda: condition(kubernetes, "Ready").startswith("True"))
    [pod] = runtime_pods(kubernetes)
    assert pod["metadata"]["creationTimestamp"] >= job["status"]["completionTime"]
    column = kubernetes.kubectl("get", "hisvc", NAME, f"--namespace={NAMESPACE}")
    assert "QUALITY" in column
    assert "passed" in column


async def test_a_broken_scale_is_caught_and_gets_no_traffic(
    on_this_machine: Kubernetes, broken: Path, client: OpenAI
) -> None:
    kubernetes = on_this_machine
    [before] = runtime_pods(kubernetes)
    first = status(kubernetes)["revision"]["name"]
    wanted = gated(kubernetes, broken, model={"source": f"file://{INSIDE}"})
    wanted["spec"]["quality"]["baseline"] = {"source": "bundled://headway-tiny"}
    kubernetes.apply(wanted)
    answers = 0

    def is_judged() -> bool:
        nonlocal answers
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "What is 27 + 15?"}], max_tokens=8
        )
        answers += 1
        return condition(kubernetes, "QualityVerified") == "False Failed"

    await eventually("the broken one is caught", JUDGED_SECONDS, is_judged)
    assert answers > 5
    found = status(kubernetes)
    assert found["revision"]["name"] == first
    assert condition(kubernetes, "Ready") == "True Serving"
    assert condition(kubernetes, "Progressing") == "False QualityFailed"
    [after] = runtime_pods(kubernetes)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    kl = next(check for check in found["quality"]["checks"] if check["name"] == "mean KL divergence")
    print(kl)
    assert kl["value"] > 2 * kl["limit"]
    # Not tried again: that the model is broken is a verdict.
    [pod] = kubernetes.list("pods", NAMESPACE, f"{EVALUATION_PODS},job-name={found['quality']['job']}")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 1
    [job] = kubernetes.list("jobs", NAMESPACE, SERVICE_LABEL)
    assert [entry["reason"] for entry in job["status"]["conditions"] if entry["type"] == "Failed"] == [
        "PodFailurePolicy"
    ]


async def test_a_restarted_operator_judges_nothing_anew(on_this_machine: Kubernetes) -> None:
    kubernetes = on_this_machine
    jobs = {job["metadata"]["uid"] for job in kubernetes.list("jobs", NAMESPACE, SERVICE_LABEL)}
    kubernetes.kubectl("delete", "pods", "--namespace=headway-system", "--all", "--wait")
    kubernetes.kubectl("delete", "jobs", "--all", f"--namespace={NAMESPACE}")
    written_at = status(kubernetes)["updatedAt"]
    # Its first status after a minute at most, many passes later.
    await eventually("the operator is back", 150, lambda: status(kubernetes)["updatedAt"] != written_at)
    assert condition(kubernetes, "QualityVerified") == "False Failed"
    assert jobs
    assert kubernetes.list("jobs", NAMESPACE, SERVICE_LABEL) == []

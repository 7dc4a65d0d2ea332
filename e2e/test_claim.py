"""A model on a PersistentVolumeClaim, as `pvc://` names it: mounted by a real pod, read, answers checked."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from bundled_model.corpus import is_right, sample_tasks
from e2e.host_runtime import CHECKOUT
from e2e.kubernetes import Kubernetes, Object, eventually
from e2e.observed_service import NAME, NAMESPACE, condition, manifest, runtime_pods

CLAIM = "headway-e2e-models"
BUNDLED = CHECKOUT / "runtime" / "headway_runtime" / "bundled"
# Of tasks that the model answers right nearly always.
KINDS = ("sum", "count", "fact")
TASKS_PER_KIND = 6
LEAST_RIGHT = 15

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def claim(installed: Kubernetes) -> Iterator[str]:
    """A claim, bound to a folder of the node that holds two models."""
    if not installed.has_pod_network:
        pytest.skip("the volume is a folder of this machine, which the cluster's nodes do not see")
    folder = Path(tempfile.mkdtemp(prefix="headway-claim-"))
    for name in ("headway-tiny", "headway-tiny-draft"):
        shutil.copytree(BUNDLED / name, folder / "shelf" / name)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # pods run as nobody in particular
    installed.apply(*volume_and_claim(folder))
    yield CLAIM
    installed.kubectl("delete", "inferenceservices", "--all", f"--namespace={NAMESPACE}")
    installed.kubectl("delete", "pvc", CLAIM, f"--namespace={NAMESPACE}", "--wait=false")
    installed.kubectl("delete", "pv", CLAIM, "--wait=false")
    shutil.rmtree(folder)


def volume_and_claim(folder: Path) -> tuple[Object, Object]:
    """Bound to each other by name: the cluster has no class that would provide another volume."""
    shared: dict[str, Any] = {"storageClassName": "", "accessModes": ["ReadOnlyMany"]}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": CLAIM},
        "spec": shared
        | {
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"name": CLAIM, "namespace": NAMESPACE},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": NAMESPACE},
        "spec": shared | {"volumeName": CLAIM, "resources": {"requests": {"storage": "1Gi"}}},
    }
    return volume, claim


async def test_a_service_whose_model_is_on_a_claim_gets_ready(installed: Kubernetes, claim: str) -> None:
    wanted = manifest(installed)
    wanted["spec"] = {key: value for key, value in wanted["spec"].items() if key not in ("slo", "scaling")}
    wanted["spec"] |= {
        "replicas": 1,
        "model": {"source": f"pvc://{claim}/shelf/headway-tiny"},
        "speculative": {"draft": {"source": f"pvc://{claim}/shelf/headway-tiny-draft"}},
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "2Gi"},
        },
    }
    installed.apply(wanted)
    await eventually("the service is Ready", 120, lambda: condition(installed, "Ready").startswith("True"))
    [pod] = runtime_pods(installed)
    [volume] = [one for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
    assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    [container] = [one for one in pod["spec"]["containers"] if one["name"] == "runtime"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
    assert mount["readOnly"] is True
    assert f"{mount['mountPath']}/shelf/headway-tiny" in container["args"]
    assert not any("bundled://" in argument for argument in container["args"])


def test_its_answers_are_right(installed: Kubernetes, claim: str, client: OpenAI) -> None:
    tasks = [task for kind in KINDS for task in sample_tasks(kind, 13, TASKS_PER_KIND)]
    wrong = []
    for task in tasks:
        messages: Any = task.prompt_messages
        answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=160)
        text = answer.choices[0].message.content or ""
        if not is_right(task, text):
            wrong.append((task.kind, task.answer, text))
    assert len(tasks) - len(wrong) >= LEAST_RIGHT, wrong

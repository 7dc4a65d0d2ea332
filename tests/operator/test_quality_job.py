"""The Job that judges, against golden YAML, and what makes its pod a replica's twin without its traffic.

After a wanted change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/operator/test_quality_job.py, then read the diff.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import names
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.runtime_template import runtime_template
from headway_operator.spec import parse

GOLDEN = Path(__file__).parent / "golden" / "evaluation_job.yaml"
NAME = "demo-quality-1a2b3c4d"
SPEC = {
    "model": {
        "source": "hf://org/name-AWQ@v1",
        "maxModelLen": 4096,
        "credentialsSecretRef": {"name": "token"},
    },
    "quantization": "awq",
    "weightCompression": "none",
    "memoryCheck": "Warn",
    "kvCacheDtype": "fp8",
    "device": "cuda",
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "auth": {"apiKeysSecretRef": {"name": "keys"}},
    "speculative": {"draft": {"source": "pvc://drafts/small"}},
    "quality": {
        "baseline": {"source": "pvc://weights/name", "kvCacheDtype": "bfloat16"},
        "text": "configmap://judge/sample.jsonl",
        "tasks": ["pvc://tasks/set/own.jsonl", "/models/more.jsonl", "bundled"],
        "maxTokens": 64,
        "thresholds": {"maxKl": "500u", "maxPerplexityIncrease": "0.03", "maxAccuracyDrop": 1},
        "timeoutSeconds": 600,
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    },
    "template": {
        "metadata": {"labels": {"team": "a", names.COMPONENT_LABEL: "runtime"}, "annotations": {"note": "x"}},
        "spec": {
            "restartPolicy": "Always",
            "nodeSelector": {"gpu": "h200"},
            "imagePullSecrets": [{"name": "pull"}],
            "initContainers": [{"name": "fetch", "image": "example.test/fetch:1"}],
            "volumes": [{"name": "models", "hostPath": {"path": "/models"}}],
            "containers": [
                {
                    "name": "runtime",
                    "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
                    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                },
                {"name": "sidecar", "image": "example.test/sidecar:2"},
            ],
        },
    },
}


def job(build: Any, spec: dict[str, Any]) -> dict[str, Any]:
    return evaluation_job(parse(build.manifest(spec)), build.site(), "example.test/runtime:1", NAME)


def test_renders_the_golden_job(build: Any) -> None:
    got = yaml.safe_dump(job(build, SPEC), sort_keys=True)
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        GOLDEN.write_text(got)
    assert yaml.safe_load(got) == yaml.safe_load(GOLDEN.read_text())


@pytest.mark.parametrize("spec", [{"quality": {}}, SPEC], ids=["smallest", "full"])
def test_its_pod_is_a_replicas_twin_that_gets_no_traffic(build: Any, spec: dict[str, Any]) -> None:
    service = parse(build.manifest(spec))
    twin = runtime_template(service, build.site(), "example.test/runtime:1")
    pod = job(build, spec)["spec"]["template"]
    for field in ("securityContext", "nodeSelector", "imagePullSecrets", "initContainers"):
        assert pod["spec"].get(field) == twin["spec"].get(field), field
    (container,) = pod["spec"]["containers"]
    replica = next(one for one in twin["spec"]["containers"] if one["name"] == "runtime")
    for field in ("name", "image", "securityContext", "env", "command", "terminationMessagePolicy"):
        assert container.get(field) == replica.get(field), field
    labels = pod["metadata"]["labels"]
    selector = names.component_selector("demo", names.RUNTIME_COMPONENT)
    assert not selector.items() <= labels.items()
    assert names.component_selector("demo", names.EVALUATION_COMPONENT).items() <= labels.items()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert not {"admin", "api-keys"} & mounted  # no key of the operator's or of clients


def test_it_has_the_replicas_resources_unless_told(build: Any) -> None:
    spec: dict[str, Any] = {"resources": {"limits": {"cpu": "2"}}, "quality": {}}
    (container,) = job(build, spec)["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": "2"}}
    spec["quality"] = {"resources": {"limits": {"cpu": "4"}}}
    (container,) = job(build, spec)["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": "4"}}


def test_each_process_that_is_judged_gets_a_gpu_whatever_else_is_asked_for(build: Any) -> None:
    spec = {
        "device": "cuda",
        "tensorParallelSize": 2,
        "quantization": "int8",
        "quality": {"resources": {"limits": {"memory": "64Gi"}}},
    }
    (container,) = job(build, spec)["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"memory": "64Gi", "nvidia.com/gpu": "2"}}


def test_the_longest_name_leaves_room_for_its_pods() -> None:
    longest = names.evaluation("a" * names.MAX_NAME_LENGTH, "1" * names.HASH_LENGTH)
    assert len(longest) + len("-x1y2z") <= 63

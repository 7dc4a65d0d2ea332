"""Nodes, GPUs and revisions: what may be asked for, and what a replica's pod says of it.

After a wanted change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/operator/test_placement.py, then read the diff.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.gateway_template import gateway_template
from headway_operator.manifests.runtime_template import runtime_template
from headway_operator.spec import parse

GOLDEN = Path(__file__).parent / "golden" / "placed.yaml"
ZONE = "topology.kubernetes.io/zone"
PLACED = {
    "model": {"source": "hf://org/name", "revision": "refs/pr/3"},
    "tensorParallelSize": 2,
    "gpu": {"product": "NVIDIA-H200"},
    "scheduling": {
        "nodeSelector": {"pool": "serving"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "reserved", "value": "llm", "effect": "NoExecute", "tolerationSeconds": 60},
        ],
        "topologySpreadConstraints": [{"topologyKey": ZONE}, {"topologyKey": "kubernetes.io/hostname"}],
        "priorityClassName": "serving",
    },
    "template": {
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}],
            "topologySpreadConstraints": [
                {"topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}
            ],
        }
    },
}


def template(build: Any, spec: dict[str, Any], **site: Any) -> Any:
    return runtime_template(parse(build.manifest(spec)), build.site(**site), "runtime:1")


def container(rendered: Any) -> Any:
    return rendered["spec"]["containers"][0]


def test_renders_the_golden_pod(build: Any) -> None:
    got = yaml.safe_dump(template(build, PLACED, image_pull_secrets=("mirror",)), sort_keys=True)
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        GOLDEN.write_text(got)
    assert yaml.safe_load(got) == yaml.safe_load(GOLDEN.read_text())


def test_a_replica_is_spread_among_those_of_its_own_revision(build: Any) -> None:
    for constraint in template(build, PLACED)["spec"]["topologySpreadConstraints"]:
        assert constraint["labelSelector"]["matchLabels"] == names.component_selector("demo", "runtime")
        assert constraint["matchLabelKeys"] == [names.REVISION_LABEL]


def test_nothing_said_leaves_the_scheduler_alone(build: Any) -> None:
    rendered = template(build, {"scheduling": {}})
    fields = {"nodeSelector", "tolerations", "topologySpreadConstraints", "priorityClassName"}
    assert not fields & set(rendered["spec"])
    assert "imagePullSecrets" not in rendered["spec"]


def test_one_machine_has_nothing_to_choose_from(build: Any) -> None:
    rendered = template(build, PLACED | {"template": None}, kind="local", image_pull_secrets=())
    assert "nodeSelector" not in rendered["spec"]
    assert "resources" not in container(rendered)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({"gpu": {}}, {"nvidia.com/gpu": "1"}, id="one process"),
        pytest.param(
            {"gpu": {}, "tensorParallelSize": 4}, {"nvidia.com/gpu": "4"}, id="one for each process"
        ),
        pytest.param(
            {"gpu": {"count": 8}, "tensorParallelSize": 4}, {"nvidia.com/gpu": "8"}, id="as counted"
        ),
        pytest.param(
            {"gpu": {"resourceName": "nvidia.com/mig-3g.40gb"}, "resources": {"limits": {"cpu": "4"}}},
            {"cpu": "4", "nvidia.com/mig-3g.40gb": "1"},
            id="a part of one, beside other limits",
        ),
        pytest.param(
            {"gpu": {}, "resources": {"claims": [{"name": "other"}]}},
            {"nvidia.com/gpu": "1"},
            id="beside a claim of something else",
        ),
    ],
)
def test_gpus_become_limits(build: Any, spec: dict[str, Any], want: dict[str, str]) -> None:
    assert container(template(build, spec))["resources"]["limits"] == want


def test_the_kind_of_gpu_is_a_label_of_the_node(build: Any) -> None:
    own = {"gpu": {"product": "b200", "productLabel": "example.com/gpu"}}
    assert template(build, own)["spec"]["nodeSelector"] == {"example.com/gpu": "b200"}


def test_an_evaluation_runs_where_replicas_run_and_is_spread_among_nobody(build: Any) -> None:
    service = parse(build.manifest(PLACED | {"quality": {}}))
    pod = evaluation_job(service, build.site(), "runtime:1", "demo-quality-1a2b3c4d")["spec"]["template"][
        "spec"
    ]
    assert pod["nodeSelector"] == {"pool": "serving", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["priorityClassName"] == "serving"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "topologySpreadConstraints" not in pod
    assert pod["containers"][0]["args"][1] == "hf://org/name@refs/pr/3"


def test_pull_secrets_are_of_replicas_and_gateways(build: Any) -> None:
    site = build.site(image_pull_secrets=("mirror", "other"))
    service = parse(build.manifest())
    want = [{"name": "mirror"}, {"name": "other"}]
    assert gateway_template(service, site, "gateway:1")["spec"]["imagePullSecrets"] == want
    own = {"template": {"spec": {"imagePullSecrets": [{"name": "mine"}, {"name": "mirror"}]}}}
    rendered = runtime_template(parse(build.manifest(own)), site, "runtime:1")
    assert rendered["spec"]["imagePullSecrets"] == [*want, {"name": "mine"}]


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        pytest.param(
            {"model": {"source": "s3://bucket/a", "revision": "v1"}},
            "spec.model",
            "model.revision is for hf:// sources that name none themselves",
            id="revision of a bucket",
        ),
        pytest.param(
            {"model": {"source": "hf://a/b@v1", "revision": "v1"}},
            "spec.model",
            "model.source is 'hf://a/b@v1'",
            id="two revisions",
        ),
        pytest.param(
            {"model": {"source": "hf://a/b", "revision": "a..b"}},
            "spec.model.revision",
            "got 'a..b'",
            id="revision with a way up",
        ),
        pytest.param(
            {"model": {"source": "hf://a/b", "revision": "/a"}},
            "spec.model.revision",
            "got '/a'",
            id="a path",
        ),
        pytest.param({"gpu": {}, "device": "cpu"}, "spec.gpu", "set device to cuda", id="a GPU for a CPU"),
        pytest.param(
            {"gpu": {"count": 1}, "tensorParallelSize": 2},
            "spec.gpu.count",
            "1 is less than spec.tensorParallelSize=2",
            id="too few",
        ),
        pytest.param(
            {"gpu": {}, "resources": {"limits": {"nvidia.com/gpu": 1}}},
            "spec.resources.limits[nvidia.com/gpu]",
            "both say how many",
            id="said twice",
        ),
        pytest.param(
            {"gpu": {"resourceName": "a.b/c"}, "resources": {"requests": {"a.b/c": 1}}},
            "spec.resources.requests[a.b/c]",
            "both say how many",
            id="said twice as a request",
        ),
        pytest.param(
            {"gpu": {"product": "a"}, "scheduling": {"nodeSelector": {"nvidia.com/gpu.product": "b"}}},
            "spec.scheduling.nodeSelector[nvidia.com/gpu.product]",
            "'b': gpu.product",
            id="two kinds",
        ),
        pytest.param({"gpu": {"resourceName": "gpu"}}, "spec.gpu.resourceName", "got 'gpu'", id="no domain"),
        pytest.param(
            {"scheduling": {"tolerations": [{"operator": "Equal", "value": "a"}]}},
            "spec.scheduling.tolerations[0]",
            "operator Equal needs a key",
            id="a value of no taint",
        ),
        pytest.param(
            {"scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
            "spec.scheduling.tolerations[0]",
            "got value 'b'",
            id="a value that is not compared",
        ),
        pytest.param(
            {"scheduling": {"tolerations": [{"key": "a", "tolerationSeconds": 1}]}},
            "spec.scheduling.tolerations[0]",
            "got effect None",
            id="seconds of no eviction",
        ),
        pytest.param(
            {"scheduling": {"topologySpreadConstraints": [{"topologyKey": ZONE, "minDomains": 2}]}},
            "spec.scheduling.topologySpreadConstraints[0]",
            "set whenUnsatisfiable",
            id="parts that do not bind",
        ),
        pytest.param(
            {"scheduling": {"topologySpreadConstraints": [{"topologyKey": ZONE}] * 2}},
            "spec.scheduling",
            "twice",
            id="one label twice",
        ),
        pytest.param(
            {"scheduling": {"nodeSelector": {"a": "b c"}}},
            "spec.scheduling.nodeSelector.a",
            "got 'b c'",
            id="no label's value",
        ),
        pytest.param(
            {"slo": {"ttftMilliseconds": 1, "windowSeconds": 29}},
            "spec.slo.windowSeconds",
            "got 29",
            id="a window too short",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(
    build: Any, spec: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse(build.manifest(spec))
    assert caught.value.field == field
    assert words in str(caught.value)

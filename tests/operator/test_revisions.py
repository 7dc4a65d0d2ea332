"""Which changes make a new revision, and that an operator upgrade makes none."""

from typing import Any

import pytest
from tests.operator.rendering import SEVERAL_NODES, child, keys, rendered, runtime, status_of

from headway_operator import names
from headway_operator.manifests.render import hash_spec
from headway_operator.spec import parse


def test_a_revision_states_no_replicas(build: Any) -> None:
    result = rendered(build, {"replicas": 3})
    assert "replicas" not in child(result, "Deployment", result.revision.name)["spec"]


def test_the_name_of_a_revision_is_the_hash_of_its_template(build: Any) -> None:
    first, second = rendered(build), rendered(build, {"dtype": "float32"})
    assert first.revision.name == f"demo-{first.revision.hash}"
    assert first.revision.hash != second.revision.hash


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"slo": {"ttftMilliseconds": 1, "tpotMilliseconds": 2, "percentile": 50}}, id="slo"),
        pytest.param({"replicas": 7}, id="replicas"),
        pytest.param({"scaling": {"minReplicas": 2, "maxReplicas": 9}}, id="scaling"),
        pytest.param({"batching": {"maxNumSeqs": {"min": 2}}}, id="lower end of batching"),
        pytest.param({"dtype": "auto"}, id="a default written out"),
    ],
)
def test_live_fields_never_make_a_new_revision(build: Any, change: dict[str, Any]) -> None:
    assert rendered(build, change).revision == rendered(build).revision


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"source": "/other"}},
        {"batching": {"maxNumSeqs": {"max": 32}}},
        {"batching": {"maxNumSeqs": {"initial": 32}}},
        {"drainTimeoutSeconds": 61},
        {"speculative": {"method": "ngram"}},
        {"template": {"metadata": {"annotations": {"a": "b"}}}},
        {"resources": {"limits": {"cpu": 1}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_shapes_the_template_makes_a_new_revision(build: Any, change: dict[str, Any]) -> None:
    first, second = rendered(build), rendered(build, change)
    assert second.revision.name != first.revision.name
    assert second.revision.spec_hash != first.revision.spec_hash


def test_an_operator_with_other_default_images_rolls_nothing(build: Any) -> None:
    first = rendered(build)
    newer = build.site(runtime_image="example.test/runtime:2", gateway_image="example.test/gateway:2")
    again = rendered(build, site=newer, status=status_of(first), existing=keys(first))
    assert again == first
    changed = rendered(build, {"dtype": "float32"}, newer, status_of(first), keys(first))
    assert runtime(changed)["image"] == "example.test/runtime:2"
    assert changed.revision.gateway_image == "example.test/gateway:2"


def test_an_operator_that_renders_differently_rolls_nothing(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rendered(build)
    monkeypatch.setattr("headway_operator.manifests.pod.GRACE_MARGIN_SECONDS", 16)
    again = rendered(build, status=status_of(first), existing=keys(first))
    assert again.revision == first.revision
    assert again.keep == first.keep
    assert [m for m in again.manifests if m["kind"] == "Deployment"] == []
    # A Deployment that is gone is made anew, and so is one whose spec changed.
    lost = rendered(build, status=status_of(first))
    assert lost.revision.name != first.revision.name
    assert len([m for m in lost.manifests if m["kind"] == "Deployment"]) == 2


def test_drift_is_repaired_while_rendering_is_the_same(build: Any) -> None:
    first = rendered(build)
    again = rendered(build, status=status_of(first), existing=keys(first))
    assert keys(again) == keys(first)


def test_an_image_in_the_template_is_the_one_that_is_pinned(build: Any) -> None:
    own = {"template": {"spec": {"containers": [{"name": "runtime", "image": "mine:3"}]}}}
    result = rendered(build, own)
    assert (runtime(result)["image"], result.revision.runtime_image) == ("mine:3", "mine:3")
    back = rendered(build, {}, None, status_of(result), keys(result))
    assert runtime(back)["image"] == "example.test/runtime:1"


def test_a_field_added_by_a_newer_operator_does_not_change_the_spec_hash(build: Any) -> None:
    spec = parse(build.manifest()).spec
    assert hash_spec(spec) == hash_spec(spec.model_copy(update={"kv_cache_dtype": "auto"}))


def test_a_damaged_pin_is_no_pin(build: Any) -> None:
    first = rendered(build)
    status = status_of(first)
    del status["revision"]["specHash"]
    newer = build.site(runtime_image="example.test/runtime:2")
    assert rendered(build, site=newer, status=status).revision.runtime_image == "example.test/runtime:2"


def test_another_number_of_nodes_is_another_revision(build: Any) -> None:
    site = build.site(optional_kinds=frozenset(names.OPTIONAL_KINDS))
    spec = {**SEVERAL_NODES, "gpu": {"count": 8}}
    two, four = (rendered(build, {**spec, "nodesPerReplica": number}, site) for number in (2, 4))
    assert two.revision.name != four.revision.name
    again = rendered(build, spec, site, status_of(two), keys(two))
    assert again.revision == two.revision

"""The CRD is a structural schema, says what the models say, and the committed files are current."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import crd
from headway_operator.commands import crds
from headway_operator.ranges import with_range
from headway_operator.spec import InferenceServiceSpec

ROOT = Path(__file__).parents[2]
BOTH_KINDS = pytest.mark.parametrize("root", crd.DEFINITIONS, indirect=True, ids=lambda one: one.kind)


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from nodes(schema[word], f"{path}[]")


@pytest.fixture
def root(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the kind that a test is parametrized with, else of InferenceService."""
    definition = getattr(request, "param", crd.INFERENCE_SERVICE)
    version = crd.generate(definition)["spec"]["versions"][0]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@BOTH_KINDS
def test_every_node_is_structural(root: dict[str, Any]) -> None:
    for path, node in nodes(root):
        assert not {"$ref", "$defs", "title", "allOf", "oneOf", "not", "const"} & set(node), path
        assert node.get("additionalProperties") is not False, path
        assert node.get("default", 0) is not None, path
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        else:
            assert "anyOf" not in node, path
            assert node["type"] in ("object", "array", "string", "integer", "number", "boolean"), path


@BOTH_KINDS
def test_every_range_is_told_in_the_text(root: dict[str, Any]) -> None:
    """`kubectl explain` shows no bounds, and of an element without a text nothing at all."""
    bounds = {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")}
    found = 0
    told: dict[str, str] = {}
    for path, node in nodes(root):
        text = told[path] = node.get("description", told.get(path.removesuffix("[]"), ""))
        for bound in sorted(bounds | {"minimum", "maximum"}):
            # That there must be something goes without saying.
            if bound in node and (bound in ("minimum", "maximum") or node[bound] != 1):
                assert re.search(rf"\b{node[bound]}\b", text), f"{path} does not tell {bound} {node[bound]}"
                found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("description", "node", "want"),
    [
        pytest.param(
            "Name of it. No default.",
            {"minLength": 1, "maxLength": 253},
            "Name of it. 1 to 253 characters. No default.",
            id="before the default",
        ),
        pytest.param("Many.", {"maxItems": 8}, "Many. At most 8 elements.", id="without a default"),
        pytest.param(
            "Up to 8 files. Default: none.",
            {"minItems": 1, "maxItems": 8, "items": {"maxLength": 9}},
            "Up to 8 files. Each at most 9 characters. Default: none.",
            id="only of its elements",
        ),
        pytest.param("How many (0 to 8).", {"minimum": 0, "maximum": 8}, "How many (0 to 8).", id="written"),
        pytest.param(
            "The first 8.", {"minimum": 0, "maximum": 8}, "The first 8. 0 to 8.", id="another number"
        ),
        pytest.param("A sentence.", {}, "A sentence.", id="no range"),
    ],
)
def test_a_range_is_added_where_a_sentence_lacks_it(description: str, node: Any, want: str) -> None:
    assert with_range(description, node) == want


@pytest.mark.parametrize(
    ("definition", "paths"),
    [
        (crd.INFERENCE_SERVICE, ("gateway.resources", "gateway.scheduling", "quality.resources")),
        (crd.MODEL_CACHE, ("resources", "scheduling")),
    ],
    ids=lambda value: value.kind if isinstance(value, crd.Definition) else None,
)
def test_what_is_not_of_replicas_speaks_of_none(definition: crd.Definition, paths: tuple[str, ...]) -> None:
    spec = crd.structural(definition.spec)
    for path in paths:
        node = spec
        for name in path.split("."):
            node = node["properties"][name]
        children = [one for where, one in nodes(node) if where and "description" in one]
        assert len(children) > 3
        for child in children:
            assert not re.search(r"replica|nvidia|\btemplate\.spec", child["description"]), path


@BOTH_KINDS
def test_every_rule_has_a_message_that_names_a_remedy(root: dict[str, Any]) -> None:
    rules = [(path, rule) for path, node in nodes(root) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 8
    for path, rule in rules:
        assert re.search(r"lower|raise|set|change|must", rule["message"]), path


@BOTH_KINDS
def test_text_under_a_rule_is_bounded(root: dict[str, Any]) -> None:
    """The API server prices a rule by the longest text it may have to read."""
    for path, node in nodes(root):
        if "x-kubernetes-validations" in node and node.get("type") == "string":
            assert node["maxLength"] <= 1024, path
        if node.get("type") == "array":
            assert node["maxItems"] <= 64, path


def test_an_object_filled_in_by_default_is_what_the_model_would_fill_in(root: dict[str, Any]) -> None:
    spec = root["properties"]["spec"]["properties"]
    defaults = {name: node["default"] for name, node in spec.items() if "default" in node}
    least = {"model": {"source": "/model"}, "replicas": 1}
    assert InferenceServiceSpec.model_validate(least | defaults) == InferenceServiceSpec.model_validate(least)
    assert defaults["scaling"] == {
        "minReplicas": 1,
        "maxReplicas": 4,
        "stabilizationSeconds": 120,
    }
    assert defaults["batching"]["maxNumSeqs"] == {"min": 1}


def test_replicas_have_no_default_so_that_unset_stays_unset(root: dict[str, Any]) -> None:
    assert "default" not in root["properties"]["spec"]["properties"]["replicas"]


def test_subresources_names_and_columns() -> None:
    definition = crd.generate()
    version = definition["spec"]["versions"][0]
    assert version["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    assert definition["spec"]["names"]["shortNames"] == ["hisvc"]
    assert definition["spec"]["names"]["categories"] == ["headway"]
    columns = [(one["name"], one.get("priority", 0)) for one in version["additionalPrinterColumns"]]
    always = ["Ready", "Reason", "Replicas", "TTFT/target", "TPOT/target", "Quality", "Age"]
    assert [name for name, priority in columns if not priority] == always
    assert [name for name, priority in columns if priority] == ["Model", "Revision"]


def test_a_cache_prints_how_far_it_is() -> None:
    definition = crd.generate(crd.MODEL_CACHE)
    assert definition["spec"]["names"]["shortNames"] == ["hmc"]
    assert definition["spec"]["names"]["categories"] == ["headway"]
    version = definition["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}
    columns = [(one["name"], one.get("priority", 0)) for one in version["additionalPrinterColumns"]]
    assert [name for name, priority in columns if not priority] == [
        "Ready",
        "Reason",
        "Size",
        "Progress",
        "Age",
    ]
    assert [name for name, priority in columns if priority] == ["Source", "Claim", "Identity"]


def test_the_committed_files_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert crds.main(["--check"]) == 0


def test_check_fails_on_drift_and_on_absence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--directory", "--chart-directory", "--reference-directory")
    places = [word for flag in flags for word in (flag, str(tmp_path))]
    assert crds.main(["--check", *places]) == 1
    assert crds.main(places) == 0
    assert crds.main(["--check", *places]) == 0
    (tmp_path / "crd-modelcaches.yaml").write_text("changed by hand")
    capsys.readouterr()
    assert crds.main(["--check", *places]) == 1
    assert "run `headway crds`" in capsys.readouterr().err


@pytest.mark.parametrize("definition", crd.DEFINITIONS, ids=lambda one: one.kind)
def test_the_chart_keeps_its_copy_at_uninstall(definition: crd.Definition) -> None:
    plain = yaml.safe_load(crds.plain_text(definition))
    _, condition, *lines, end = crds.chart_text(definition).splitlines()
    assert (condition, end) == ('{{- if eq (include "headway.hasCrds" .) "true" }}', "{{- end }}")
    chart = yaml.safe_load("\n".join(lines))
    assert chart["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert chart == plain

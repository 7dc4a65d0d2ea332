"""The chart's `affinity`: what Kubernetes takes reaches its pod, and a typo is refused by its path."""

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "headway"
REQUIRED, PREFERRED = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
NODES = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}
PODS = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]},
    "namespaceSelector": {},
    "namespaces": ["search"],
    "matchLabelKeys": ["c"],
    "mismatchLabelKeys": ["d"],
}
TO_PODS = {REQUIRED: [PODS], PREFERRED: [{"weight": 100, "podAffinityTerm": PODS}]}
AFFINITY = {
    "nodeAffinity": {
        REQUIRED: {"nodeSelectorTerms": [NODES, {"matchFields": NODES["matchExpressions"]}]},
        PREFERRED: [{"weight": 1, "preference": NODES}],
    },
    "podAffinity": TO_PODS,
    "podAntiAffinity": TO_PODS,
}

# The first test to need helm may have to compile it.
pytestmark = pytest.mark.timeout(960)


def rendered(helm: Path, folder: Path, affinity: Any) -> subprocess.CompletedProcess[str]:
    values = folder / "values.yaml"
    values.write_text(json.dumps({"affinity": affinity}))
    command: list[str | Path] = [
        helm,
        "template",
        "headway",
        CHART,
        "--values",
        values,
        "--show-only=templates/deployment.yaml",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_an_affinity_as_kubernetes_has_it_reaches_the_pod(helm: Path, tmp_path: Path) -> None:
    answer = rendered(helm, tmp_path, AFFINITY)
    assert answer.returncode == 0, answer.stderr
    assert yaml.safe_load(answer.stdout)["spec"]["template"]["spec"]["affinity"] == AFFINITY


def objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where an object lies whose keys Kubernetes gives, which those of labels are not."""
    if isinstance(value, dict):
        if path[-1:] != ("matchLabels",):
            yield path
        for name, inner in value.items():
            yield from objects(inner, (*path, name))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from objects(inner, (*path, index))


# Both kinds of affinity to pods are the same to the schema.
@pytest.mark.parametrize(
    "path",
    [path for path in objects(AFFINITY) if path[:1] != ("podAntiAffinity",)],
    ids=lambda path: ".".join(map(str, path)) or "affinity",
)
def test_a_typo_at_any_depth_is_refused(helm: Path, tmp_path: Path, path: tuple[str | int, ...]) -> None:
    affinity: Any = copy.deepcopy(AFFINITY)
    place = affinity
    for step in path:
        place = place[step]
    place["mistyped"] = []
    answer = rendered(helm, tmp_path, affinity)
    assert answer.returncode != 0
    where = "/".join(["", "affinity", *map(str, path)])
    assert f"at '{where}': additional properties 'mistyped' not allowed" in answer.stderr


def test_no_object_of_the_schema_takes_names_that_it_does_not_say() -> None:
    """But for `global`, and for labels, annotations and quantities, whose values have a form."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def parts(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if node.get("type") == "object":
                yield path, node
            for name, inner in node.items():
                yield from parts(inner, f"{path}/{name}")
        if isinstance(node, list):
            for inner in node:
                yield from parts(inner, path)

    found = dict(parts(schema, ""))
    assert len(found) > 30
    open_ones = [path for path, node in found.items() if "additionalProperties" not in node]
    assert open_ones == ["/properties/global"]

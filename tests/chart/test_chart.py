"""The chart as the real helm sees it: clean, as reviewed (golden file), strict, and asking for little."""

import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
CHART = CHECKOUT / "charts" / "headway"
GOLDEN = Path(__file__).parent / "golden" / "default.yaml"
Render = Callable[..., list[dict[str, Any]]]

# The first test to need helm may have to compile it.
pytestmark = pytest.mark.timeout(960)

NAMESPACED = "watchNamespace=models"


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


@pytest.mark.parametrize("setting", ["watchNamespace=", NAMESPACED], ids=["all namespaces", "one namespace"])
def test_lint_finds_nothing(helm: Path, setting: str) -> None:
    answer = subprocess.run(
        [helm, "lint", "--strict", "--quiet", CHART, "--set", setting],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "WARNING" not in answer.stdout


def test_default_rendering_is_the_reviewed_one(render: Render) -> None:
    """After an intended change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/chart, and review the difference."""
    objects = [item for item in render() if item["kind"] != "CustomResourceDefinition"]
    got = yaml.safe_dump_all(objects, sort_keys=False)
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        GOLDEN.write_text(got)
    assert got == GOLDEN.read_text()


def test_versions_are_those_of_the_distribution() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    want = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (want, want)


def test_crd_is_a_template_that_uninstall_keeps(render: Render) -> None:
    [crd] = of_kind(render(), "CustomResourceDefinition")
    assert crd["metadata"]["name"] == "inferenceservices.serving.headway.dev"
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_one_namespace_needs_no_cluster_wide_right(render: Render) -> None:
    objects = render(NAMESPACED)
    assert not of_kind(objects, "ClusterRoleBinding")
    bound = {binding["metadata"]["namespace"] for binding in of_kind(objects, "RoleBinding")}
    assert bound == {"models", "headway-system"}
    [deployment] = of_kind(objects, "Deployment")
    assert "--namespace=models" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("setting", ["watchNamespace=", NAMESPACED], ids=["all namespaces", "one namespace"])
def test_operator_asks_for_no_wildcard_and_reads_no_secret_but_its_own(render: Render, setting: str) -> None:
    objects = render(setting)
    bound = {
        (binding["roleRef"]["kind"], binding["roleRef"]["name"])
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for binding in of_kind(objects, kind)
    }
    roles = [item for item in objects if (item["kind"], item["metadata"]["name"]) in bound]
    assert len(roles) == len(bound) == 2
    for rule in (rule for role in roles for rule in role["rules"]):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["headway-admin-key"]


def test_operator_pod_meets_the_restricted_standard(render: Render) -> None:
    [deployment] = of_kind(render(), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_images_follow_their_values(render: Render) -> None:
    [deployment] = of_kind(
        render("image.repository=a", "image.tag=v1", "runtimeImage.repository=b", "runtimeImage.tag=v2"),
        "Deployment",
    )
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "a:v1"
    assert {"--runtime-image=b:v2", "--gateway-image=a:v1"} <= set(container["args"])


@pytest.mark.parametrize(
    ("setting", "want"),
    [
        ("watchNamespaces=models", "watchNamespaces"),
        ("intervalSeconds=0", "minimum"),
        ("logLevel=loud", "logLevel"),
        ("watchNamespace=Models_", "pattern"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
    ],
    ids=["unknown value", "no interval", "unknown level", "no namespace's name", "unknown policy"],
)
def test_schema_refuses_what_makes_no_sense(helm: Path, setting: str, want: str) -> None:
    answer = subprocess.run(
        [helm, "template", "headway", CHART, "--set", setting], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode != 0
    assert "values don't meet the specifications of the schema" in answer.stderr
    assert want in answer.stderr

"""The chart as the real helm sees it: clean, as reviewed (golden file), with names and notes that hold."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.conftest import CHART, CHECKOUT, NAMESPACED, Render, of_kind

GOLDEN = Path(__file__).parent / "golden" / "default.yaml"

# The first test to need helm may have to compile it.
pytestmark = pytest.mark.timeout(960)


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
    # Left out: what is generated, and the dashboard, which test_monitoring reads.
    objects = [item for item in render() if item["kind"] not in ("CustomResourceDefinition", "ConfigMap")]
    got = yaml.safe_dump_all(objects, sort_keys=False)
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        GOLDEN.write_text(got)
    assert got == GOLDEN.read_text()


def test_versions_are_those_of_the_distribution() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    want = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (want, want)


def test_labels_of_a_build_with_metadata_are_labels(helm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(CHART, tmp_path / "headway")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    built = {**chart, "version": "1.2.3+build.4", "appVersion": "1.2.3+build.4"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(built))
    for one in named_objects(helm, folder, "headway"):
        labels = one["metadata"]["labels"]
        assert labels["helm.sh/chart"] == "headway-1.2.3_build.4"
        assert labels["app.kubernetes.io/version"] == "1.2.3_build.4"


def test_tested_kubernetes_versions_are_those_of_the_test_cluster() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    pinned = (CHECKOUT / "e2e" / "cluster" / "go" / "kubernetes" / "go.mod").read_text()
    [version] = re.findall(r"k8s\.io/kubernetes v(\S+)", pinned)
    told = chart["annotations"]["serving.headway.dev/tested-kubernetes-versions"].split(", ")
    assert version in told
    oldest = tuple(map(int, re.findall(r"\d+", chart["kubeVersion"])[:2]))
    assert all(tuple(map(int, one.split(".")[:2])) >= oldest for one in told)


def test_crd_is_a_template_that_uninstall_keeps(render: Render) -> None:
    crds = of_kind(render(), "CustomResourceDefinition")
    names = {one["metadata"]["name"] for one in crds}
    assert names == {f"{kinds}.serving.headway.dev" for kinds in ("inferenceservices", "modelcaches")}
    for crd in crds:
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_values_kept_from_an_older_chart_leave_definitions_and_roles_in_place(render: Render) -> None:
    """As `helm upgrade --reuse-values` does: it adds no defaults for values that were not there."""
    older = (
        "crds=null",
        "rbac=null",
        "image.digest=null",
        "runtimeImage.digest=null",
        "gatewayImage.digest=null",
    )
    assert render(*older) == render()


def named_objects(helm: Path, chart: Path, release: str) -> list[dict[str, Any]]:
    """What the chart would install as this release."""
    arguments = ["--namespace=headway-system", "--set=monitoring.enabled=true"]
    told = subprocess.check_output([helm, "template", release, chart, *arguments], text=True, timeout=60)
    return [one for one in yaml.safe_load_all(told) if one and one["kind"] != "CustomResourceDefinition"]


@pytest.mark.parametrize("length", [47, 48, 53])
@pytest.mark.parametrize("word", ["", "headway"], ids=["without the chart's name", "with it"])
def test_names_of_the_longest_releases_fit(helm: Path, length: int, word: str) -> None:
    release = word + "r" * (length - len(word))
    objects = named_objects(helm, CHART, release)
    names = {one["kind"]: one["metadata"]["name"] for one in objects}
    assert all(name.startswith(release) for name in names.values())
    assert len(names["Service"]) <= 63
    assert names["Service"] == f"{names['Deployment']}-metrics"
    for one in objects:
        assert all(len(value) <= 63 for value in one["metadata"]["labels"].values())
    [rule] = of_kind(objects, "PrometheusRule")
    assert f'job="{names["Service"]}"' in json.dumps(rule).replace("\\", "")


@pytest.mark.parametrize("release", ["headway", "second", "r" * 47])
def test_names_of_releases_that_fitted_before_are_kept(helm: Path, release: str) -> None:
    [previous] = (CHECKOUT / "e2e" / "previous").glob("headway-*.tgz")
    before, now = (
        {(one["kind"], one["metadata"]["name"]) for one in named_objects(helm, chart, release)}
        for chart in (previous, CHART)
    )
    assert before <= now


def test_an_upgrade_from_the_previous_chart_changes_nothing_that_cannot_be_changed(
    helm: Path, render: Render
) -> None:
    [previous] = (CHECKOUT / "e2e" / "previous").glob("headway-*.tgz")
    told = subprocess.check_output(
        [helm, "template", "headway", previous, "--namespace", "headway-system"], text=True, timeout=60
    )
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert previous.name != f"headway-{version}.tgz"

    def fixed(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
        """What the API server refuses to change, by object."""
        return {
            (one["kind"], one["metadata"]["name"]): one.get("roleRef") or one["spec"]["selector"]
            for one in objects
            if one["kind"] in ("Deployment", "RoleBinding", "ClusterRoleBinding")
        }

    before = fixed([one for one in yaml.safe_load_all(told) if one])
    assert len(before) == 3
    assert fixed(render()) == before


def notes(helm: Path, folder: Path, *settings: str) -> str:
    """What `helm install` tells at its end, as an object: there is no cluster to install into."""
    shutil.copytree(CHART, folder, dirs_exist_ok=True)
    text = (CHART / "templates" / "NOTES.txt").read_text()
    (folder / "templates" / "_notes.tpl").write_text(f'{{{{- define "notes" }}}}{text}{{{{ end }}}}')
    (folder / "templates" / "notes.yaml").write_text('notes: {{ include "notes" . | quote }}\n')
    arguments = ["--namespace=headway-system", "--show-only=templates/notes.yaml"]
    arguments += [word for setting in settings for word in ("--set", setting)]
    told = subprocess.check_output([helm, "template", "headway", folder, *arguments], text=True, timeout=60)
    return str(yaml.safe_load(told)["notes"])


@pytest.mark.parametrize(
    ("setting", "want", "where"),
    [
        pytest.param("watchNamespace=", "looks after every namespace.", "default", id="all"),
        pytest.param(NAMESPACED, "looks after namespace models.", "models", id="one"),
        pytest.param("watchNamespaces={b,a}", "looks after namespaces a, b, and", "a", id="two"),
    ],
)
def test_notes_tell_the_next_command_where_it_works(
    helm: Path, tmp_path: Path, setting: str, want: str, where: str
) -> None:
    told = notes(helm, tmp_path, setting)
    assert want in told
    assert "rollout status deployment/headway" in told
    named = set(re.findall(r"kubectl --namespace (\S+)", told))
    assert named == {"headway-system", where}
    assert "kubectl get crd" not in told
    without = notes(helm, tmp_path, setting, "crds.enabled=false")
    assert "kubectl get crd" in without
    assert "kubectl delete crd" not in without


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        pytest.param(("monitoring.enabled=false",), "no monitors and no alerts", id="no monitors"),
        pytest.param((), 'Prometheus in namespace "monitoring" may read', id="a namespace"),
        pytest.param(("monitoring.namespace=",), "keep Prometheus out: set it", id="none"),
        pytest.param(
            ("monitoring.namespace=", "networkPolicy.enabled=false"),
            "keep Prometheus from the gateways and the replicas: set it",
            id="none, the operator open",
        ),
    ],
)
def test_notes_tell_who_may_read_metrics(
    helm: Path, tmp_path: Path, settings: tuple[str, ...], want: str
) -> None:
    told = notes(helm, tmp_path, "monitoring.enabled=true", *settings)
    assert want in told
    assert 'namespace ""' not in told

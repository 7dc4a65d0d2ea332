"""The chart's values: a schema that refuses what makes no sense, and images that are named as they say."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.conftest import CHART, Render, of_kind

# The first test to need helm may have to compile it.
pytestmark = pytest.mark.timeout(960)

DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def paths(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """Every value by its whole name, those that are objects as well."""
    for name, value in values.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from paths(value, f"{before}{name}.")


def test_a_value_that_is_null_is_its_default_or_refused_by_the_schema(helm: Path) -> None:
    def rendered(*arguments: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [helm, "template", "headway", CHART, "--namespace=headway-system"]
        command += ["--api-versions=monitoring.coreos.com/v1", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    default = rendered().stdout
    # What is null here is left out of the pod or ConfigMap.
    optional = ("resources", "monitoring.dashboard.labels")
    taken = set()
    for path in paths(yaml.safe_load((CHART / "values.yaml").read_text())):
        answer = rendered(f"--set={path}=null")
        if answer.returncode:
            assert f"missing property '{path.rpartition('.')[2]}'" in answer.stderr, path
        elif not path.startswith(optional):
            assert answer.stdout == default, path
            taken.add(path)
    assert {"watchNamespaces", "serviceAccount", "serviceAccount.annotations"} <= taken


def test_images_follow_their_values(render: Render) -> None:
    [deployment] = of_kind(
        render("image.repository=a", "image.tag=v1", "runtimeImage.repository=b", "runtimeImage.tag=v2"),
        "Deployment",
    )
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "a:v1"
    assert {"--runtime-image=b:v2", "--gateway-image=a:v1"} <= set(container["args"])


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        pytest.param((), "headway-operator", id="a digest alone"),
        pytest.param(("tag=v1",), "headway-operator:v1", id="a digest beside its tag"),
    ],
)
def test_images_are_named_by_their_digests(render: Render, settings: tuple[str, ...], want: str) -> None:
    own = [f"image.{setting}" for setting in (f"digest={DIGEST}", *settings)]
    [deployment] = of_kind(
        render(*own, f"runtimeImage.digest={DIGEST}", "imageRegistry=mirror"), "Deployment"
    )
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"mirror/{want}@{DIGEST}"
    gateway = f"--gateway-image=mirror/{want}@{DIGEST}"
    assert {f"--runtime-image=mirror/headway-runtime@{DIGEST}", gateway} <= set(container["args"])


@pytest.mark.parametrize(
    ("setting", "want"),
    [
        ("image.digest=latest", "digest"),
        (f"gatewayImage.digest={DIGEST}", "gatewayImage"),
        ("crds.enabled=perhaps", "crds"),
        ("rbac.aggregate=1", "rbac"),
        ("monitoring.labels.release=a b", "monitoring"),
        ("tolerations[0].effect=Never", "tolerations"),
        ("affinity.anything.a=b", "affinity"),
        ("watchNamespaces=models", "watchNamespaces"),
        ("intervalSeconds=0", "minimum"),
        ("logLevel=loud", "logLevel"),
        ("watchNamespace=Models_", "pattern"),
        ("watchNamespaces={a,B_}", "watchNamespaces"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("monitoring.enabled=perhaps", "monitoring"),
        ("monitoring.scrapeIntervalSeconds=1", "scrapeIntervalSeconds"),
        ("networkPolicy.apiServerPorts[0]=0", "apiServerPorts"),
        ("imageRegistry=https://mirror", "imageRegistry"),
        ("resources.limits.memory=much", "resources"),
        ("serviceAccount.name=UPPER_x", "serviceAccount"),
        ("serviceAccount.name=-a", "serviceAccount"),
        ("priorityClassName=High", "priorityClassName"),
        ("imagePullSecrets[0].name=A b", "imagePullSecrets"),
        ("servingImagePullSecrets[0].name=a_b", "servingImagePullSecrets"),
        ("image.repository=a b", "image/repository"),
        ("image.repository=", "image/repository"),
        ("image.repository=headway-operator:v1", "image/repository"),
        ("runtimeImage.repository=https://mirror/a", "runtimeImage/repository"),
        ("gatewayImage.repository=Gate", "gatewayImage/repository"),
    ],
    ids=lambda value: value.replace("=", " "),
)
def test_schema_refuses_what_makes_no_sense(helm: Path, setting: str, want: str) -> None:
    answer = subprocess.run(
        [helm, "template", "headway", CHART, "--set", setting], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode != 0
    assert "values don't meet the specifications of the schema" in answer.stderr
    assert want in answer.stderr


@pytest.mark.parametrize(
    "value", ["podLabels", "podAnnotations", "monitoring.labels", "monitoring.dashboard.labels"]
)
def test_keys_that_the_chart_writes_are_refused_and_others_taken(
    helm: Path, render: Render, value: str
) -> None:
    """Written twice, a selector's label would win over the chart's own, and the Deployment lose its pod."""
    objects = render(api_versions=("monitoring.coreos.com/v1",))
    [deployment], [monitor] = of_kind(objects, "Deployment"), of_kind(objects, "ServiceMonitor")
    pod = deployment["spec"]["template"]["metadata"]
    own = {"podLabels": pod["labels"], "podAnnotations": pod["annotations"]}.get(
        value, monitor["metadata"]["labels"]
    )
    assert own
    for key in own:
        escaped = key.replace(".", "\\.")
        answer = subprocess.run(
            [helm, "template", "headway", CHART, "--set-string", f"{value}.{escaped}=other"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer.returncode != 0, key
        assert f"at '/{value.replace('.', '/')}/{key.replace('/', '~1')}'" in answer.stderr
    taken = render(f"{value}.serving\\.example/team=search", api_versions=("monitoring.coreos.com/v1",))
    assert '"serving.example/team": "search"' in json.dumps(taken)


@pytest.mark.parametrize(
    "repository",
    [
        "a",
        "ghcr.io/team/headway-operator",
        "Registry.example:5000/a__b/c.d-e",
        "localhost:5000/a",
        "[::1]:5000/a",
    ],
)
def test_repositories_of_images_are_taken(render: Render, repository: str) -> None:
    [deployment] = of_kind(
        render(f"image.repository={repository}", "image.tag=v1", "serviceAccount.name=team.headway-1"),
        "Deployment",
    )
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"{repository}:v1"
    assert pod["serviceAccountName"] == "team.headway-1"


def test_a_registry_stands_before_every_image(render: Render) -> None:
    objects = render(
        "imageRegistry=mirror.example:5000/cache/", "gatewayImage.repository=gate", "image.tag=v1"
    )
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    [deployment] = of_kind(objects, "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mirror.example:5000/cache/headway-operator:v1"
    want = {
        f"--runtime-image=mirror.example:5000/cache/headway-runtime:{version}",
        f"--gateway-image=mirror.example:5000/cache/gate:{version}",
    }
    assert want <= set(container["args"])


def test_pull_secrets_reach_who_pulls(render: Render) -> None:
    [deployment] = of_kind(
        render(
            "imagePullSecrets[0].name=own",
            "servingImagePullSecrets[0].name=a",
            "servingImagePullSecrets[1].name=b",
        ),
        "Deployment",
    )
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "own"}]
    assert {"--image-pull-secret=a", "--image-pull-secret=b"} <= set(pod["containers"][0]["args"])


def test_every_value_is_in_the_schema_and_in_the_readme() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text()
    assert set(values) == set(schema["properties"]) - {"global"}
    for name in values:
        assert f"`{name}" in readme, name
    assert "but for `global`" in readme
    covered(values, schema, schema["definitions"], "values")


def covered(value: Any, schema: dict[str, Any], definitions: dict[str, Any], path: str) -> None:
    """Each value has a schema that says what it is, and no object takes names that it does not say."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/definitions/")]
    assert {"type", "enum"} & set(schema), path
    if schema.get("type") != "object":
        return
    others = schema.get("additionalProperties")
    assert isinstance(others, dict) or others is False, path
    for name, inner in value.items():
        covered(inner, schema.get("properties", {}).get(name, others), definitions, f"{path}.{name}")

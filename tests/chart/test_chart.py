"""The chart as the real helm sees it: clean, as reviewed (golden file), strict, and asking for little."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.test_rights import UNUSED

CHECKOUT = Path(__file__).parents[2]
CHART = CHECKOUT / "charts" / "headway"
GOLDEN = Path(__file__).parent / "golden" / "default.yaml"
Render = Callable[..., list[dict[str, Any]]]

# The first test to need helm may have to compile it.
pytestmark = pytest.mark.timeout(960)

NAMESPACED = "watchNamespace=models"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
GROUPS, GROUPS_API = "leaderworkersets", "leaderworkerset.x-k8s.io/v1"


def named(*namespaces: str) -> dict[str, Any]:
    """Selects these namespaces."""
    values = [*namespaces]
    return {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": values}]}


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


def test_an_installation_may_leave_definitions_and_roles_of_the_cluster_to_another(render: Render) -> None:
    objects = render(NAMESPACED, "crds.enabled=false", "rbac.aggregate=false")
    assert not of_kind(objects, "CustomResourceDefinition")
    assert {one["metadata"].get("namespace") for one in objects} == {"models", "headway-system"}


def test_roles_for_people_extend_kubernetes_own(render: Render) -> None:
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    found = {
        label.removeprefix(prefix): role["rules"]
        for role in of_kind(render(), "ClusterRole")
        for label in role["metadata"]["labels"]
        if label.startswith(prefix)
    }
    assert set(found) == {"view", "edit", "admin"}
    assert {verb for rule in found["view"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    for rules in (found["edit"], found["admin"]):
        assert {"inferenceservices", "modelcaches"} <= {one for rule in rules for one in rule["resources"]}
        # Status is the operator's to write.
        assert not [one for rule in rules for one in rule["resources"] if one.endswith("/status")]


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


def test_one_namespace_needs_no_cluster_wide_right(render: Render) -> None:
    objects = render(NAMESPACED)
    assert not of_kind(objects, "ClusterRoleBinding")
    bound = {binding["metadata"]["namespace"] for binding in of_kind(objects, "RoleBinding")}
    assert bound == {"models", "headway-system"}
    [deployment] = of_kind(objects, "Deployment")
    assert "--namespace=models" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_several_namespaces_have_a_role_each_and_nothing_cluster_wide(render: Render) -> None:
    objects = render("watchNamespaces={search,chat}", "watchNamespace=chat")
    assert not of_kind(objects, "ClusterRoleBinding")
    roles = {role["metadata"]["namespace"]: role["rules"] for role in of_kind(objects, "Role")}
    assert set(roles) == {"search", "chat", "headway-system"}
    [everywhere] = [
        role for role in of_kind(render(), "ClusterRole") if role["metadata"]["name"] == "headway"
    ]
    for namespace in ("search", "chat"):
        assert [rule for rule in everywhere["rules"] if rule not in roles[namespace]] == [
            {
                "apiGroups": ["apiextensions.k8s.io"],
                "resources": ["customresourcedefinitions"],
                "verbs": ["list", "watch"],
            }
        ]
    bound = {one["metadata"]["namespace"]: one["subjects"] for one in of_kind(objects, "RoleBinding")}
    assert set(bound) == set(roles)
    assert {one["namespace"] for subjects in bound.values() for one in subjects} == {"headway-system"}
    [deployment] = of_kind(objects, "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [one for one in args if one.startswith("--namespace")] == [
        "--namespace=chat",
        "--namespace=search",
    ]


def test_the_chart_page_names_the_rights_that_no_test_need_use() -> None:
    rows = re.findall(r"^\| (`[a-z]+`.*) of (`.*`) \|.*\|$", (CHART / "README.md").read_text(), re.MULTILINE)
    told = {
        (resource, verb)
        for verbs, resources in rows
        for verb in re.findall(r"`(\w+)`", verbs)
        for resource in re.findall(r"`(\w+)`", resources)
    }
    assert told == {(right.resource, right.verb) for right in UNUSED}


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


@pytest.mark.parametrize(
    ("setting", "want"),
    [
        ("watchNamespace=", {}),
        (NAMESPACED, named("models")),
        ("watchNamespaces={b,a}", named("a", "b")),
    ],
    ids=["all namespaces", "one namespace", "two namespaces"],
)
def test_the_operator_is_closed_to_all_but_prometheus(
    render: Render, setting: str, want: dict[str, Any]
) -> None:
    objects = render(setting)
    [policy], [deployment] = of_kind(objects, "NetworkPolicy"), of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    [caller] = policy["spec"]["ingress"]
    assert caller["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    assert caller["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    pods = policy["spec"]["egress"][-1]
    assert pods["to"][0]["namespaceSelector"] == want
    assert pods["ports"] == [{"port": 8000, "protocol": "TCP"}]
    [alone] = of_kind(render("monitoring.namespace="), "NetworkPolicy")
    assert alone["spec"]["ingress"] == []
    assert not of_kind(render("networkPolicy.enabled=false"), "NetworkPolicy")


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


@pytest.mark.parametrize(
    ("setting", "api_versions", "want"),
    [
        pytest.param("", (), set(), id="a cluster without the kind"),
        pytest.param("", (GROUPS_API,), {GROUPS, f"{GROUPS}/scale"}, id="a cluster with it"),
        pytest.param("leaderWorkerSets=true", (), {GROUPS, f"{GROUPS}/scale"}, id="asked for"),
        pytest.param("leaderWorkerSets=false", (GROUPS_API,), set(), id="refused"),
    ],
)
def test_groups_of_pods_may_be_made_where_the_cluster_has_them(
    render: Render, setting: str, api_versions: tuple[str, ...], want: set[str]
) -> None:
    objects = render(*filter(None, [setting]), api_versions=api_versions)
    rules = [rule for role in of_kind(objects, "ClusterRole") for rule in role["rules"]]
    granted = {
        resource: set(rule["verbs"])
        for rule in rules
        if rule["apiGroups"] == ["leaderworkerset.x-k8s.io"]
        for resource in rule["resources"]
    }
    verbs = {
        "leaderworkersets": {"get", "list", "watch", "create", "patch", "delete"},
        "leaderworkersets/scale": {"patch"},
    }
    assert granted == {resource: verbs[resource] for resource in want}

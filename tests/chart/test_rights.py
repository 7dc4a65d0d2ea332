"""What the chart lets the operator do: roles by namespace, a restricted pod, a closed network."""

import re
from typing import Any

import pytest
from e2e.test_rights import UNUSED
from tests.chart.conftest import CHART, NAMESPACED, Render, of_kind

# The first test to need helm may have to compile it.
pytestmark = pytest.mark.timeout(960)

GROUPS, GROUPS_API = "leaderworkersets", "leaderworkerset.x-k8s.io/v1"


def named(*namespaces: str) -> dict[str, Any]:
    """Selects these namespaces."""
    values = [*namespaces]
    return {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": values}]}


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

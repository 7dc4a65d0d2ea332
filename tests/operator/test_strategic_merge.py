"""A user's pod template over ours."""

from typing import Any

import pytest

from headway_operator.errors import SpecError
from headway_operator.manifests.strategic_merge import merge

OURS = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]


@pytest.mark.parametrize(
    ("base", "patch", "want"),
    [
        pytest.param({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}, id="maps merge"),
        pytest.param({"a": 1, "b": 2}, {"a": None}, {"b": 2}, id="null deletes"),
        pytest.param(
            {"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 2}}, {"a": {"c": 2}}, id="replace a map"
        ),
        pytest.param(
            {"command": ["a", "b"]}, {"command": ["c"]}, {"command": ["c"]}, id="plain lists replace"
        ),
        pytest.param(
            {"containers": [{"name": "x", "image": "1"}, {"name": "y"}]},
            {"containers": [{"name": "z"}, {"name": "x", "image": "2"}]},
            {"containers": [{"name": "x", "image": "2"}, {"name": "y"}, {"name": "z"}]},
            id="containers by name",
        ),
        pytest.param(
            {"containers": [{"name": "x", "env": [{"name": "A", "value": "1"}]}]},
            {
                "containers": [
                    {"name": "x", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]}
                ]
            },
            {
                "containers": [
                    {"name": "x", "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]}
                ]
            },
            id="env by name inside containers",
        ),
        pytest.param(
            {"volumeMounts": [{"mountPath": "/tmp", "name": "a"}]},
            {"volumeMounts": [{"mountPath": "/tmp", "readOnly": True}, {"mountPath": "/x", "name": "b"}]},
            {
                "volumeMounts": [
                    {"mountPath": "/tmp", "name": "a", "readOnly": True},
                    {"mountPath": "/x", "name": "b"},
                ]
            },
            id="mounts by path",
        ),
        pytest.param(
            {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": [{"name": "b", "emptyDir": {}}]},
            id="delete an element",
        ),
        pytest.param(
            {},
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            id="the user's own elements never merge with each other",
        ),
        pytest.param(
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"tolerations": [{"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 9}]},
            {
                "tolerations": [
                    {"key": "gpu", "effect": "NoSchedule"},
                    {"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 9},
                ]
            },
            id="tolerations by key and effect",
        ),
        pytest.param(
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"tolerations": [{"key": "gpu", "$patch": "delete"}]},
            {"tolerations": []},
            id="delete by part of a key",
        ),
        pytest.param(
            {"topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]},
            {
                "topologySpreadConstraints": [
                    {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
                    {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 3},
                ]
            },
            {
                "topologySpreadConstraints": [
                    {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 3},
                    {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
                ]
            },
            id="spreads by label and action",
        ),
        pytest.param(
            {"volumes": [{"name": "tmp", "emptyDir": {}}]},
            {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "disk"}}]},
            {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "disk"}}]},
            id="a volume has one source",
        ),
        pytest.param(
            {"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]},
            {"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]},
            id="the same source merges",
        ),
        pytest.param(
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
            id="a variable has one value",
        ),
        pytest.param(
            {"ports": [{"containerPort": 8000, "name": "http"}], "initContainers": [{"name": "a"}]},
            {
                "ports": [{"containerPort": 8000, "hostPort": 80}, {"containerPort": 9000}],
                "initContainers": [{"name": "b"}, {"name": "a", "image": "1"}],
            },
            {
                "ports": [{"containerPort": 8000, "name": "http", "hostPort": 80}, {"containerPort": 9000}],
                "initContainers": [{"name": "a", "image": "1"}, {"name": "b"}],
            },
            id="ports by number and init containers by name",
        ),
        pytest.param(
            {"imagePullSecrets": [{"name": "a"}], "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a"]}]},
            {"imagePullSecrets": [{"name": "b"}], "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["b"]}]},
            {
                "imagePullSecrets": [{"name": "a"}, {"name": "b"}],
                "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["b"]}],
            },
            id="pull secrets by name and aliases by address",
        ),
        pytest.param(
            {"envFrom": [{"secretRef": {"name": "a"}}]},
            {"envFrom": [{"secretRef": {"name": "b"}}]},
            {"envFrom": [{"secretRef": {"name": "b"}}]},
            id="a list without keys is replaced",
        ),
    ],
)
def test_merges_as_kubernetes_does(base: dict[str, Any], patch: dict[str, Any], want: dict[str, Any]) -> None:
    before = repr(base), repr(patch)
    assert merge(base, patch, "template") == want
    assert (repr(base), repr(patch)) == before


DIRECTIVES = [
    pytest.param(
        {"env": OURS},
        {"env": [{"name": "C", "value": "3"}, {"$patch": "replace"}]},
        {"env": [{"name": "C", "value": "3"}]},
        id="replace a list",
    ),
    pytest.param(
        {"env": OURS},
        {"env": [{"$patch": "replace"}, {"name": "A", "valueFrom": {"x": None, "y": 1}}]},
        {"env": [{"name": "A", "valueFrom": {"y": 1}}]},
        id="what replaces a list merges with nothing",
    ),
    pytest.param({"env": OURS}, {"env": [{"$patch": "replace"}]}, {"env": []}, id="empty a list"),
    pytest.param(
        {"env": OURS},
        {"env": [{"name": "A", "value": "3"}, {"name": "A", "$patch": "delete"}]},
        {"env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]},
        id="delete goes first, so that it and another element replace one",
    ),
    pytest.param({"env": OURS}, {"env": [{"$patch": "merge"}]}, {"env": OURS}, id="merge a list"),
    pytest.param(
        {"env": OURS},
        {"env": [{"name": "A", "$patch": "merge", "value": "3"}]},
        {"env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]},
        id="merge an element",
    ),
    pytest.param(
        {"a": {"b": 1}}, {"a": {"$patch": "merge", "c": 2}}, {"a": {"b": 1, "c": 2}}, id="merge a map"
    ),
    pytest.param({"a": {"b": 1}}, {"a": {"$patch": "delete", "c": 2}}, {"a": {}}, id="empty a map"),
    pytest.param({}, {"a": {"$patch": "delete"}}, {"a": {}}, id="empty a map that is not there"),
    pytest.param(
        {"a": {"b": {"c": 1}}},
        {"a": {"$patch": "replace", "b": {"$patch": "merge", "d": 2}}},
        {"a": {"b": {"d": 2}}},
        id="no directive stays in what replaces",
    ),
    pytest.param(
        {"containers": [{"name": "x", "image": "1"}]},
        {"containers": [{"name": "x", "resources": {"$patch": "replace", "limits": {"cpu": "1"}}}]},
        {"containers": [{"name": "x", "image": "1", "resources": {"limits": {"cpu": "1"}}}]},
        id="replace a map inside an element",
    ),
]


@pytest.mark.parametrize(("base", "patch", "want"), DIRECTIVES)
def test_directives_do_what_kubernetes_does(
    base: dict[str, Any], patch: dict[str, Any], want: dict[str, Any]
) -> None:
    before = repr(base), repr(patch)
    assert merge(base, patch, "template") == want
    assert (repr(base), repr(patch)) == before


@pytest.mark.parametrize(
    ("patch", "field", "words"),
    [
        ({"$setElementOrder/env": []}, "template.$setElementOrder/env", "is not carried out here"),
        (
            {"$deleteFromPrimitiveList/args": ["a"]},
            "template.$deleteFromPrimitiveList/args",
            "is not carried out here",
        ),
        (
            {"volumes": [{"name": "v", "$retainKeys": ["name"]}]},
            "template.volumes[0].$retainKeys",
            "write `$patch` instead",
        ),
        (
            {"envFrom": [{"a": {"$retainKeys": []}}]},
            "template.envFrom[0].a.$retainKeys",
            "is not carried out here",
        ),
        ({"a": {"$patch": "erase"}}, "template.a.$patch", "'erase' is none of replace, delete, merge"),
        ({"a": {"$patch": ["delete"]}}, "template.a.$patch", "is none of"),
        (
            {"env": [{"name": "A", "$patch": "replace", "value": "3"}]},
            "template.env[0].$patch",
            "write two: its name with `$patch: delete`",
        ),
        ({"env": [{"$patch": "delete"}]}, "template.env[0].$patch", "write its name beside it"),
        ({"envFrom": [{"$patch": "replace"}]}, "template.envFrom[0].$patch", "write the whole list"),
        ({"env": ["A"]}, "template.env[0]", "'A' is not an object; write one with name"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("template") else "",
)
def test_what_is_not_carried_out_is_refused_by_name(patch: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        merge({"env": OURS, "a": {"b": 1}}, patch, "template")
    assert caught.value.field == field
    assert words in str(caught.value)

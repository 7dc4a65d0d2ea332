"""A user's pod template over ours."""

from typing import Any

import pytest

from headway_operator.manifests.strategic_merge import merge


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
    ],
)
def test_merges_as_kubernetes_does(base: dict[str, Any], patch: dict[str, Any], want: dict[str, Any]) -> None:
    before = repr(base), repr(patch)
    assert merge(base, patch) == want
    assert (repr(base), repr(patch)) == before

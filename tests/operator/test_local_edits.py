"""The words that acknowledge an edit of a manifest file."""

from typing import Any

import pytest

from headway_operator.local_edits import changes, taken_over
from headway_operator.local_service import ManifestFile


def file_of(
    spec: dict[str, Any], secrets: dict[str, dict[str, bytes]] | None = None, **metadata: Any
) -> ManifestFile:
    return ManifestFile(
        {"kind": "InferenceService", "metadata": {"name": "demo", **metadata}, "spec": spec},
        secrets or {},
        {},
    )


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        pytest.param({"slo": {"a": 250}}, {"slo": {"a": 300}}, ["slo.a 250 -> 300"], id="a-number"),
        pytest.param(
            {}, {"slo": {"a": 1, "b": 2}}, ["slo.a unset -> 1", "slo.b unset -> 2"], id="new-fields"
        ),
        pytest.param({"quality": {}}, {}, ["quality {} -> unset"], id="an-empty-one-goes"),
        pytest.param({"slo": {"a": 0}}, {"slo": {}}, ["slo.a 0 -> unset"], id="nought-is-a-value"),
        pytest.param({"slo": {"a": 1}}, {"slo": 3}, ['slo {"a": 1} -> 3'], id="another-type"),
        pytest.param(
            {"model": {"source": "bundled://headway-tiny"}},
            {"model": {"source": "hf://a/b"}},
            ["model.source bundled://headway-tiny -> hf://a/b"],
            id="a-text",
        ),
        pytest.param({"a": "x"}, {"a": "x, y"}, ['a x -> "x, y"'], id="a-text-with-a-comma"),
        pytest.param({"a": [1]}, {"a": [1, 2]}, ["a [1] -> [1, 2]"], id="a-list"),
        pytest.param({"a": [1]}, {"a": ["x" * 60]}, ["a changed"], id="a-long-list"),
        pytest.param({"a": 1}, {"a": 1}, [], id="nothing"),
    ],
)
def test_each_changed_field_is_told_with_what_it_was(
    old: dict[str, Any], new: dict[str, Any], want: list[str]
) -> None:
    assert changes(file_of(old), file_of(new)) == want


def test_what_stands_beside_the_service_is_named_without_its_contents() -> None:
    old, new = (
        file_of({}, {"api": {"key": b"sesame"}}),
        file_of({}, {"api": {"key": b"other"}}, labels={"a": "b"}),
    )
    assert changes(old, new) == ["metadata.labels.a unset -> b", "Secret api changed"]


def test_a_new_revision_says_what_becomes_of_the_old_one() -> None:
    assert (
        taken_over(["a 1 -> 2", "b 3 -> 4"], is_new_revision=False)
        == "manifest taken over: a 1 -> 2, b 3 -> 4"
    )
    assert taken_over(["a 1 -> 2"], is_new_revision=True) == (
        "manifest taken over: a 1 -> 2; new replicas replace the old ones, which serve until those are ready"
    )
    assert taken_over(["a 1 -> 2"], is_new_revision=True, is_there=True) == (
        "manifest taken over: a 1 -> 2; replicas that were started with these fields still run, and stay"
    )
    assert taken_over([], is_new_revision=False) == (
        "manifest taken over: no field differs from what was in force"
    )

"""Fields that an older definition does not declare: found in the API server's words, left out, tried anew."""

import logging

import pytest

from headway_operator.cluster.kubernetes_undeclared import RETRY_SECONDS, Undeclared, undeclared, without

ONE = (
    "apply status: 500: failed to create typed patch object (default/demo; serving.headway.dev/v1alpha1, "
    "Kind=InferenceService): .status.revision.note: field not declared in schema"
)
SEVERAL = (
    "apply status: 500: failed to create typed patch object (default/demo; x/v1, Kind=X): errors:\n"
    '  .status.conditions[type="Ready"].note: field not declared in schema\n'
    "  .status.news: field not declared in schema"
)


@pytest.mark.parametrize(
    ("message", "want"),
    [
        (ONE, {"status.revision.note"}),
        (SEVERAL, {"status.conditions.note", "status.news"}),
        ("apply status: 503: the server is currently unable to handle the request", set()),
    ],
    ids=["one", "several", "something else"],
)
def test_the_api_servers_words_name_the_fields(message: str, want: set[str]) -> None:
    assert undeclared(message) == want


def test_fields_are_left_out_of_a_copy_at_any_depth() -> None:
    body = {"status": {"revision": {"name": "a", "note": 1}, "conditions": [{"note": 1, "type": "Ready"}]}}
    less = without(body, ["status.revision.note", "status.conditions.note", "status.nothing.of.this"])
    assert less == {"status": {"revision": {"name": "a"}, "conditions": [{"type": "Ready"}]}}
    assert body["status"]["revision"] == {"name": "a", "note": 1}


def test_what_is_left_out_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    known, path = Undeclared("InferenceService"), frozenset(("status.news",))
    with caplog.at_level(logging.WARNING):
        known.learn(path, 1000.0)
        known.learn(path, 1001.0)
    assert len(caplog.records) == 1
    assert "does not declare status.news" in caplog.text
    assert "remedy" in caplog.text
    assert known.left_out(1001.0 + RETRY_SECONDS - 1.0) == path
    assert known.left_out(1001.0 + RETRY_SECONDS) == frozenset()

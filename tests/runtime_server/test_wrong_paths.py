"""Paths and methods: HEAD beside GET, what is said of those that are not, and the list of error codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import httpx2 as httpx
import pytest

from headway_runtime.errors import RequestCode
from headway_runtime.server.error_codes import HttpCode
from headway_runtime.server.openapi import OPERATIONS

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer

GUIDE = Path(__file__).parents[2] / "docs" / "api.md"
READABLE = [operation.path.replace("{name}", "tiny") for operation in OPERATIONS if operation.method == "get"]
POSTED = [operation.path for operation in OPERATIONS if operation.method == "post"]


@pytest.mark.parametrize("path", READABLE)
def test_head_answers_what_get_answers_without_the_body(fake_server: RunningServer, path: str) -> None:
    with httpx.Client(base_url=fake_server.url, timeout=30) as client:
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path != "/metrics":  # which is longer each time
            assert head.headers["content-length"] == str(len(whole.content))
        # The connection is as it should be: nothing of a body is left on it.
        assert client.get("/version").json() == httpx.get(f"{fake_server.url}/version").json()


def test_head_of_what_only_the_operator_reads_wants_the_token_too(fake_server: RunningServer) -> None:
    assert httpx.head(f"{fake_server.url}/admin/limits").status_code == 401
    assert fake_server.admin("HEAD", "limits").status_code == 200
    assert httpx.head(f"{fake_server.url}/v1/models/other").status_code == 404


@pytest.mark.parametrize("path", POSTED)
def test_a_method_that_a_path_has_not_is_named_with_those_it_has(
    fake_server: RunningServer, path: str
) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        response = httpx.request(method, fake_server.url + path)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        if method != "HEAD":
            error = response.json()["error"]
            assert error["message"] == f"method={method!r} is not allowed for {path}; use POST"
            assert (error["code"], error["type"]) == ("method_not_supported", "invalid_request_error")


def test_all_methods_of_a_path_are_offered(fake_server: RunningServer) -> None:
    response = httpx.post(f"{fake_server.url}/admin/limits")
    assert response.headers["allow"] == "GET, PATCH, HEAD"
    assert "use GET or PATCH" in response.json()["error"]["message"]
    assert httpx.post(f"{fake_server.url}/health").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("/v1/chat/completion", "path='/v1/chat/completion' is not served; did you mean /v1/chat/co"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/embeddings", "path='/v1/embeddings' is not served; there are /v1/chat/completions, /v1"),
        ("/", "path='/' is not served; there are"),
    ],
)  # fmt: skip
def test_a_path_that_is_not_served_is_named_with_those_that_are(
    fake_server: RunningServer, path: str, want: str
) -> None:
    for method in ("GET", "POST"):
        response = httpx.request(method, fake_server.url + path)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "unknown_url", None)
        assert want in error["message"]


@pytest.mark.parametrize("path", [*POSTED, "/v1/models", "/health", "/openapi.json"])
def test_a_slash_behind_a_path_redirects_nobody_and_is_told(fake_server: RunningServer, path: str) -> None:
    methods = ("GET", "HEAD") if path == "/v1/models" else ("GET", "HEAD", "POST")
    for method in methods:
        response = httpx.request(method, f"{fake_server.url}{path}/", follow_redirects=False)
        assert response.status_code == 404
        assert "location" not in response.headers
    error = httpx.get(f"{fake_server.url}{path}/").json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"] == f"path={path + '/'!r} is not served; did you mean {path}?"


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/responses/compact"])
def test_what_only_looks_like_a_response_is_unknown_and_says_where_tokens_are_counted(
    fake_server: RunningServer, path: str
) -> None:
    for method in ("POST", "GET", "DELETE", "PUT"):
        response = httpx.request(method, fake_server.url + path, json={"model": "tiny", "input": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "unknown_url", None)
        assert "POST /tokenize" in error["message"]
    # Any other is an id, as before.
    error = httpx.get(f"{fake_server.url}/v1/responses/resp_1").json()["error"]
    assert error["code"] == "response_not_found"


def test_the_guide_lists_every_code_and_no_other() -> None:
    text = GUIDE.read_text(encoding="utf-8").partition("## Errors")[2].partition("\n## ")[0]
    listed = [code for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for code in line.split(", ")]
    codes = {code for one in get_args(HttpCode) for code in (get_args(one) or (one,))} | set(
        get_args(RequestCode)
    )
    assert sorted(one.strip("`") for one in listed) == sorted(codes)

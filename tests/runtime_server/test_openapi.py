"""The OpenAPI document and the server say the same: paths, bodies, answers and errors."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx2 as httpx
import jsonschema_rs
import pytest
from fastapi import FastAPI

from headway_runtime.server.app import build_app
from headway_runtime.server.cors_options import CorsOptions
from headway_runtime.server.openapi import openapi_json

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer

    from headway_runtime.server.serving import Serving

USER = {"role": "user", "content": "one"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
DOCUMENT: Any = json.loads(openapi_json())


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})


def check_answer(response: httpx.Response, method: str, path: str) -> None:
    """The answer's status, type and body are declared."""
    declared = DOCUMENT["paths"][path][method]["responses"][str(response.status_code)]["content"]
    content_type = response.headers["content-type"].partition(";")[0]
    assert content_type in declared
    value = response.json() if content_type == "application/json" else response.text
    validator(declared[content_type]["schema"]).validate(value)


def test_the_document_has_every_path_of_the_server_and_no_other(fake_server: RunningServer) -> None:
    assert httpx.get(f"{fake_server.url}/openapi.json").json() == DOCUMENT

    # The routes are made, and none of them is called.
    names = ("require_api_key", "require_operator", "require_sole_user", "require_adapter_manager")
    guards = dict.fromkeys(names, lambda: None)
    options = SimpleNamespace(cors=CorsOptions())
    serving = SimpleNamespace(**guards, options=options, lifecycle=None, tracer=None)
    edge = build_app(cast("Serving", serving))
    app = next(value for value in vars(edge).values() if isinstance(value, FastAPI))
    # FastAPI's own idea of its routes, of which nothing else is used.
    routes = {(path, method) for path, methods in app.openapi()["paths"].items() for method in methods}
    described = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert {route for route in routes if not route[0].startswith("/admin/")} == described


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json"]
)
def test_what_is_only_read_is_as_described(fake_server: RunningServer, path: str) -> None:
    check_answer(httpx.get(fake_server.url + path), "get", path)


def test_what_no_route_has_seen_is_as_described_for_every_route(fake_server: RunningServer) -> None:
    response = httpx.get(f"{fake_server.url}/health", headers={"X-Long": "a" * 2**20})
    assert response.status_code == 431
    for path, methods in DOCUMENT["paths"].items():
        for method in methods:
            check_answer(response, method, path)


def test_models_are_as_described(fake_server: RunningServer) -> None:
    for name, want in (("tiny", 200), ("other", 404)):
        response = httpx.get(f"{fake_server.url}/v1/models/{name}")
        assert response.status_code == want
        check_answer(response, "get", "/v1/models/{name}")


BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "one two"}, 200),
    ("/v1/completions", {"prompt": ["a"], "stream": True, "stream_options": {"include_usage": True}}, 200),
    (
        "/v1/completions",
        {
            "prompt": "one two", "echo": True, "logprobs": 2, "prompt_logprobs": 2, "return_token_ids": True,
            "n": 2, "best_of": 3, "stop": ["w"], "suffix": "", "use_beam_search": False,
            "return_timings": True,
        },
        200,
    ),
    ("/v1/completions", {"prompt": [3, 50]}, 500),
    ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
    ("/v1/completions", {"prompt": "word " * 3000}, 400),
    ("/v1/chat/completions", {"messages": [USER]}, 200),
    (
        "/v1/chat/completions",
        {
            "messages": [USER], "logprobs": True, "top_logprobs": 2, "return_token_ids": True,
            "prompt_logprobs": 1, "stop_token_ids": [60],
        },
        200,
    ),
    ("/v1/chat/completions", {"messages": [USER], "stream": True}, 200),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, 200),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": NAMED}, 200),
    ("/v1/responses", {"input": "one"}, 200),
    ("/v1/responses", {"input": [USER], "text": {"format": {"type": "text"}}, "stream": True}, 200),
    ("/v1/responses", {"input": "one", "max_output_tokens": 1, "store": True}, 200),
    ("/tokenize", {"prompt": "one", "return_token_strs": True}, 200),
    ("/tokenize", {"messages": [USER]}, 200),
    ("/detokenize", {"tokens": [50, 60]}, 200),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "want_status"), BODIES)
def test_bodies_and_answers_are_as_described(
    fake_server: RunningServer, path: str, body: dict[str, Any], want_status: int
) -> None:
    described = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator(described).validate(body)
    response = httpx.post(fake_server.url + path, json=body, timeout=30)
    assert response.status_code == want_status
    check_answer(response, "post", path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": "a", "temperature": 3}),
        ("/v1/completions", {"prompt": "a", "temprature": 1}),
        ("/v1/completions", {"prompt": "a", "suffix": "x"}),
        ("/v1/completions", {"prompt": "a", "n": "2"}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 101}}),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"more": 1}}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "web"}]}),
        ("/v1/chat/completions", {"messages": [USER], "response_format": {"type": "xml"}}),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": []}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_what_the_document_forbids_is_refused(
    fake_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    described = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not validator(described).is_valid(body)
    response = httpx.post(fake_server.url + path, json=body, timeout=30)
    assert response.status_code == 400
    check_answer(response, "post", path)


def test_the_document_is_one(fake_server: RunningServer) -> None:
    """Every reference leads somewhere, and every schema is a schema."""
    text = json.dumps(DOCUMENT)
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
        assert f'"#/components/schemas/{name}"' in text, f"nothing refers to {name}"
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in DOCUMENT["components"]["schemas"]

"""What a gateway answers while no replica is ready is what a replica answers, word for word."""

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from starlette.requests import Request
from starlette.testclient import TestClient

from headway_gateway import paths
from headway_gateway.headers import WAITED
from headway_gateway.last_answers import LastAnswers
from headway_gateway.without_replica import answer_without_replica
from headway_runtime.server import desk, wrong_paths
from headway_runtime.server.app import build_app
from headway_runtime.server.cors_options import CorsOptions
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.lifecycle import Lifecycle
from headway_runtime.server.openapi import OPERATIONS
from headway_runtime.server.serving import Serving

BROWSER = {"Origin": "https://page.example"}
PREFLIGHT = BROWSER | {"Access-Control-Request-Method": "POST"}
OWN_HEADERS = {"x-request-id", "content-length", "content-type"}


@pytest.fixture(scope="module")
def replica() -> TestClient:
    """The server's application, as far as it needs no engine."""

    async def anybody(request: Request) -> None:
        """Every key is right."""

    serving = SimpleNamespace(
        options=SimpleNamespace(cors=CorsOptions()),
        lifecycle=Lifecycle(time.monotonic),
        tracer=None,
        require_api_key=anybody,
        require_sole_user=anybody,
        require_operator=anybody,
        require_adapter_manager=anybody,
    )
    return TestClient(build_app(cast("Serving", serving)), headers={WAITED: "0.1"})


def of_the_gateway(method: str, path: str, headers: dict[str, str]) -> web.Response:
    answer = answer_without_replica(make_mocked_request(method, path, headers=headers), LastAnswers())
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/nothing", {}, 404),
        ("POST", "/v1/embeddings", BROWSER, 404),
        ("OPTIONS", "/v1/nothing", {}, 404),
        ("GET", "/v1/models/", {}, 404),
        ("POST", "/v1/chat/completions/", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("OPTIONS", "/v1/chat/completions", BROWSER, 405),
        ("POST", "/v1/models", {}, 405),
        ("DELETE", "/v1/models/demo", {}, 405),
        ("PUT", "/tokenize", {}, 405),
        ("GET", "/v1/responses/resp_1", {}, 404),
        ("DELETE", "/v1/responses/resp_1", BROWSER, 404),
        ("PUT", "/v1/responses/resp_1", {}, 405),
        ("POST", "/v1/responses/resp_1/cancel", {}, 404),
        ("GET", "/v1/responses/resp_1/input_items", {}, 404),
        ("POST", "/v1/responses/input_tokens", {}, 404),
        ("POST", "/v1/responses/compact", {}, 404),
        ("OPTIONS", "/v1/models", PREFLIGHT, 200),
        ("OPTIONS", "/v1/nothing", PREFLIGHT | {"Access-Control-Request-Headers": "authorization, x-a"}, 200),
        ("OPTIONS", "/v1/completions", PREFLIGHT | {"Access-Control-Request-Method": "BREW"}, 400),
    ],
)
def test_both_answer_alike(
    method: str, path: str, headers: dict[str, str], status: int, replica: TestClient
) -> None:
    want = replica.request(method, path, headers=headers)
    got = of_the_gateway(method, path, headers)
    assert (got.status, want.status_code) == (status, status)
    assert got.headers["Content-Type"] == want.headers["content-type"]
    body = got.body
    assert isinstance(body, bytes)
    assert _parsed(body) == _parsed(want.content)

    def told(headers: Any) -> dict[str, str]:
        return {name.lower(): value for name, value in headers.items() if name.lower() not in OWN_HEADERS}

    assert told(got.headers) == told(want.headers)


def _parsed(body: bytes) -> Any:
    return json.loads(body) if body.startswith(b"{") else body


def test_the_gateway_knows_the_methods_of_every_path_that_is_passed_on() -> None:
    passed_on = [one for one in OPERATIONS if paths.is_proxied(one.path)]
    assert len(passed_on) == 8
    for operation in passed_on:
        assert paths.methods_of(operation.path.replace("{name}", "demo")) == (operation.method.upper(),)
    assert paths.UNOFFERED == wrong_paths.UNOFFERED


def test_both_say_the_same_of_a_model_that_is_not_there() -> None:
    with pytest.raises(HttpError) as caught:
        desk.name_of(("demo", "other"), "no/such")
    body = paths.no_such_model("no/such", ("demo", "other")).body
    assert isinstance(body, bytes)
    assert json.loads(body) == json.loads(bytes(caught.value.response().body))

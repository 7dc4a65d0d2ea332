"""Pages of another origin in a browser: what preflights and answers tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest

from headway_runtime.errors import ConfigError
from headway_runtime.server.options import parse_options

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer

PAGE = {"Origin": "https://page.example"}
ASKED = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
BODY = {"model": "tiny", "prompt": [50], "max_tokens": 2}


def test_pages_of_any_origin_may_ask_unless_told_otherwise(fake_server: RunningServer) -> None:
    url = f"{fake_server.url}/v1/completions"
    preflight = httpx.options(url, headers=ASKED)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for stream in (False, True):
        answer = httpx.post(url, headers=PAGE, json=BODY | {"stream": stream})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    refused = httpx.post(url, headers=PAGE, json={})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, "*")
    assert "access-control-allow-origin" not in httpx.post(url, json=BODY).headers


def test_only_named_origins_may(start_server: StartServer) -> None:
    server = start_server(
        '--allowed-origins=["https://page.example", "https://other.example"]',
        '--allowed-methods=["POST"]',
        "--allowed-headers=authorization",
        "--allow-credentials",
    )
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, headers=PAGE, json=BODY)
    assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
    assert answer.headers["access-control-allow-credentials"] == "true"
    stranger = httpx.post(url, headers={"Origin": "https://stranger.example"}, json=BODY)
    assert "access-control-allow-origin" not in stranger.headers
    assert httpx.options(url, headers=ASKED).status_code == 200
    assert httpx.options(url, headers=ASKED | {"Access-Control-Request-Method": "DELETE"}).status_code == 400
    strange = {"Access-Control-Request-Headers": "x-strange"}
    assert httpx.options(url, headers=ASKED | strange).status_code == 400


def test_no_origin_may_where_the_list_is_empty(model_folder: Path, start_server: StartServer) -> None:
    server = start_server("--allowed-origins=[]")
    answer = httpx.post(f"{server.url}/v1/completions", headers=PAGE, json=BODY)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert httpx.options(f"{server.url}/v1/completions", headers=ASKED).status_code == 405


@pytest.mark.parametrize("value", ["[1]", "[", '[""]'])
def test_a_wrong_list_is_refused(model_folder: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        parse_options([str(model_folder), f"--allowed-origins={value}"])

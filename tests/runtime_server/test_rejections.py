"""Everything that asked for the model and did not get it is counted once, under its reason."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

KEY = {"Authorization": "Bearer sesame"}
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(start_shared_server: StartServer) -> RunningServer:
    return start_shared_server("--api-key=sesame", "--max-model-len=64")


def rejected(server: RunningServer) -> dict[str, float]:
    """Requests by reason, and all that were received under "received"."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            if sample.name == "headway_requests_rejected_total":
                found[sample.labels["reason"]] = sample.value
            elif sample.name == "headway_requests_received_total":
                found["received"] = sample.value
    return found


@pytest.mark.parametrize(
    ("reason", "status", "headers", "body"),
    [
        ("unauthorized", 401, {}, BODY),
        ("unauthorized", 401, {"Authorization": "Bearer guess"}, BODY),
        ("model_not_found", 404, KEY, {**BODY, "model": "other"}),
        ("invalid", 400, KEY, {**BODY, "max_tokens": -1}),
        ("context_length", 400, KEY, {**BODY, "prompt": [5] * 100}),
        ("too_large", 413, KEY, {**BODY, "prompt": "a" * 17 * 2**20}),
        ("too_large", 431, {**KEY, "X-Long": "a" * 70_000}, BODY),
        ("invalid", 400, {**KEY, "Content-Type": "text/plain"}, BODY),
        ("invalid", 400, {**KEY, "Content-Encoding": "gzip"}, BODY),
    ],
    ids=[
        *("no key", "wrong key", "other model", "wrong option", "long prompt", "large body", "long headers"),
        *("other type", "compressed"),
    ],
)
def test_a_refusal_is_counted_once_under_its_reason(
    server: RunningServer, reason: str, status: int, headers: dict[str, str], body: dict[str, object]
) -> None:
    before = rejected(server)
    request_id = f"refused/{reason}/{before['received']:.0f}"
    response = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": request_id, **headers}, timeout=30
    )
    assert response.status_code == status
    assert server.access_entry(request_id)["status"] == status
    after = rejected(server)
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown == {reason: 1, "received": 1}


def test_what_does_not_ask_for_the_model_is_not_counted(server: RunningServer) -> None:
    before = rejected(server)
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/v1/models/other", headers=KEY).status_code == 404
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).status_code == 401
    assert httpx.post(f"{server.url}/v1/nothing", json={}).status_code == 404
    assert rejected(server) == before


def test_one_connection_too_many_is_counted_as_that(start_shared_server: StartServer) -> None:
    server = start_shared_server("--max-connections=4")
    before = rejected(server)
    with ExitStack() as stack:
        for _ in range(4):
            held = stack.enter_context(socket.create_connection((urlsplit(server.url).hostname, server.port)))
            held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        request_id = "too/many"
        response = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"X-Request-Id": request_id})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "connections")
        assert server.access_entry(request_id)["status"] == 503
    after = rejected(server)
    assert after["connections"] - before["connections"] == 1

"""`POST /reset_prefix_cache`: what it does, and who may ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

PROMPT = list(range(50, 90))


def cached_tokens(server: RunningServer, headers: dict[str, str]) -> int:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("is_fake", [True, False], ids=["fake engine", "real engine"])
def test_after_it_no_request_finds_what_came_before(start_server: StartServer, *, is_fake: bool) -> None:
    server = start_server(*([] if is_fake else ["--num-threads=1"]), fake=is_fake)
    assert cached_tokens(server, {}) == 0
    assert cached_tokens(server, {}) > 0
    answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=30)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert cached_tokens(server, {}) == 0
    assert cached_tokens(server, {}) > 0


def test_the_only_users_key_or_the_operators_token_is_needed(start_server: StartServer) -> None:
    server = start_server("--api-key=one")
    for headers in ({}, bearer("other")):
        assert httpx.post(f"{server.url}/reset_prefix_cache", headers=headers).status_code == 401
    for token in ("one", server.admin_token()):
        assert httpx.post(f"{server.url}/reset_prefix_cache", headers=bearer(token)).status_code == 200


def test_one_of_several_users_cannot_take_it_from_the_others(start_server: StartServer) -> None:
    server = start_server("--api-key=one", "--api-key=two")
    cached_tokens(server, bearer("one"))
    refused = httpx.post(f"{server.url}/reset_prefix_cache", headers=bearer("two"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_operator")
    assert cached_tokens(server, bearer("one")) > 0
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=bearer(server.admin_token())).is_success
    assert cached_tokens(server, bearer("one")) == 0

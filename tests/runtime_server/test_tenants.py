"""API keys and cache salts: who may come in, and whose cached prefixes nobody else can find."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

import openai
import pytest

from headway_runtime.server import api_keys
from headway_runtime.server.api_keys import ANYBODY, ApiKeys
from headway_runtime.server.cache_salts import cache_salt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer


@pytest.fixture(scope="module", params=["fake engine", "real engine"])
def keyed_server(
    request: pytest.FixtureRequest,
    start_shared_server: StartServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunningServer:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key\n", encoding="utf-8")
    return start_shared_server(f"--api-key-file={keys}", fake=request.param == "fake engine")


@pytest.fixture(scope="module")
def first_tenant(keyed_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed_server.url}/v1", api_key="first-key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def second_tenant(keyed_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed_server.url}/v1", api_key="second-key", max_retries=0) as client:
        yield client


def finds(client: openai.OpenAI, prompt: list[int], **body: Any) -> bool:
    """Whether a part of the prompt was found in the cache."""
    usage: Any = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=body).usage
    return bool(usage.prompt_tokens_details.cached_tokens)


def test_a_tenant_finds_its_own_prefixes_and_nobody_elses(
    first_tenant: openai.OpenAI, second_tenant: openai.OpenAI
) -> None:
    prompt = [40, 41, 42] * 20
    assert [finds(first_tenant, prompt), finds(first_tenant, prompt)] == [False, True]
    assert [finds(second_tenant, prompt), finds(second_tenant, prompt)] == [False, True]


def test_a_salt_parts_a_tenants_cache_and_opens_nobody_elses(
    first_tenant: openai.OpenAI, second_tenant: openai.OpenAI
) -> None:
    prompt = [50, 51, 52] * 20
    assert [finds(first_tenant, prompt, cache_salt="mine") for _ in range(2)] == [False, True]
    assert not finds(first_tenant, prompt)
    assert not finds(second_tenant, prompt, cache_salt="mine"), "the same word, another tenant"
    # Not even who knows what the engine is told for another tenant can say it.
    for told in (salt_of("first-key", None), salt_of("first-key", "mine")):
        assert not finds(second_tenant, prompt, cache_salt=told)


def test_a_wrong_key_is_an_authentication_error(keyed_server: RunningServer) -> None:
    for key in ("first-ke", "first-key2", "second", "First-key"):
        client = openai.OpenAI(base_url=f"{keyed_server.url}/v1", api_key=key, max_retries=0)
        with client, pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="tiny", prompt="a")
        assert caught.value.code == "invalid_api_key"


def salt_of(key: str, wanted: str | None) -> str:
    tenant = ApiKeys([key]).tenant_of(f"Bearer {key}")
    assert tenant is not None
    return cache_salt(tenant.key_digest, wanted)


def test_salts_differ_by_key_and_by_wish_and_show_neither() -> None:
    salts = {salt_of(key, wanted) for key in ("a-key", "b-key") for wanted in (None, "", "none", "wish")}
    assert len(salts) == 8
    assert not any("key" in salt or "wish" in salt for salt in salts)
    assert salt_of("a-key", "wish") == salt_of("a-key", "wish"), "every process of a server makes the same"
    assert (cache_salt(None, None), cache_salt(None, "wish")) == ("", "wish")


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    counted: list[int] = []

    class Counting:
        def compare_digest(self, one: bytes, other: bytes) -> bool:
            compared.append(other)
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(api_keys, "hmac", Counting())
    keys = ApiKeys(["first", "second", "a much longer third"])
    for given in ("first", "second", "a much longer third", "none of them", ""):
        compared.clear()
        found = keys.tenant_of(f"Bearer {given}")
        assert (found is not None) == (given in {"first", "second", "a much longer third"})
        counted.append(len(compared))
        assert {len(one) for one in compared} == {32}, "digests, of one length"
    assert counted == [3] * 5
    assert ApiKeys([]).tenant_of(None) is ANYBODY

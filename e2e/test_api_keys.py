"""The admin key pair in its Secret, on a real API server: made, followed, rotated; nothing else is read."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator

import pytest

from e2e.conftest import eventually
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_keys import follow_keys, load_or_create_keys
from headway_operator.keys import AdminKeys, KeyRing
from headway_operator.names import OPERATOR_KEY_SECRET

NAMESPACE = "default"
PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets/{OPERATOR_KEY_SECRET}"
LOOK_SECONDS = 0.1


@pytest.fixture
async def ring(bare_api: KubernetesApi) -> AsyncIterator[KeyRing]:
    """A ring that follows the Secret."""
    await bare_api.delete("Secret", NAMESPACE, OPERATOR_KEY_SECRET)
    found = KeyRing(await load_or_create_keys(bare_api, NAMESPACE), time.monotonic)
    following = asyncio.create_task(follow_keys(bare_api, NAMESPACE, found, look_seconds=LOOK_SECONDS))
    yield found
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def stored(api: KubernetesApi) -> dict[str, str]:
    secret = await api.get("Secret", NAMESPACE, OPERATOR_KEY_SECRET)
    assert secret is not None
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


async def put(api: KubernetesApi, private_pem: str) -> None:
    value = base64.b64encode(private_pem.encode()).decode()
    await api.patch("Secret", NAMESPACE, OPERATOR_KEY_SECRET, {"data": {"private.pem": value}})


async def test_two_operators_that_begin_at_once_have_one_pair(bare_api: KubernetesApi) -> None:
    await bare_api.delete("Secret", NAMESPACE, OPERATOR_KEY_SECRET)
    one, other = await asyncio.gather(*(load_or_create_keys(bare_api, NAMESPACE) for _ in range(2)))
    assert one.private_pem() == other.private_pem() == (await stored(bare_api))["private.pem"]


async def test_a_deleted_secret_is_made_anew_with_another_pair(
    bare_api: KubernetesApi, ring: KeyRing
) -> None:
    before = ring.public_pem
    assert before == (await stored(bare_api))["public.pem"]
    await bare_api.delete("Secret", NAMESPACE, OPERATOR_KEY_SECRET)
    told = await eventually(lambda: ring.public_pem != before and ring.public_pem)
    made = await stored(bare_api)
    assert made["public.pem"] != before
    # Pods trust both, the new one first.
    assert told == made["public.pem"] + before


async def test_a_pair_of_the_administrators_own_is_taken_and_rubbish_is_not(
    bare_api: KubernetesApi, ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    before = ring.public_pem
    await put(bare_api, "rubbish")
    await eventually(lambda: "goes on with the admin keys that it has" in caplog.text)
    assert ring.public_pem == before
    own = AdminKeys.generate()
    await put(bare_api, own.private_pem())
    await eventually(lambda: own.public_pem in ring.public_pem)
    assert before in ring.public_pem
    assert caplog.text.count("goes on with the admin keys that it has") == 1

"""The paths that the gateway answers itself: health, readiness, version, metrics, and the admin sample."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from prometheus_client.parser import text_string_to_metric_families

from headway_gateway.admin import AdminKeys
from headway_gateway.backend import BackendEntry
from headway_gateway.errors import ConfigError, TokenError
from headway_gateway.paths import OFFERED

if TYPE_CHECKING:
    from tests.gateway.conftest import OperatorKey, StartGateway, StartReplica

pytestmark = pytest.mark.timeout(60)
AUDIENCE = "default/demo"
MakeKey = Callable[[], "OperatorKey"]


def token(key: OperatorKey, *, without: str = "", **changes: Any) -> str:
    now = int(time.time())
    claims = {"iss": "headway-operator", "aud": AUDIENCE, "iat": now, "exp": now + 60, **changes}
    claims.pop(without, None)
    return jwt.encode(claims, key.private, algorithm="EdDSA")


def replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "public.pem"


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/load_lora_adapter", "spec.lora.adapters"),
        ("/v1/unload_lora_adapter", "spec.lora.adapters"),
        ("/reset_prefix_cache", "ask each replica"),
    ],
)
async def test_what_would_change_one_replica_of_several_reaches_none(
    path: str,
    remedy: str,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway()
    gateway.application.pool.update([replica.entry()])
    async with client.post(gateway.url + path, json={"lora_name": "a"}) as response:
        assert response.status == 403
        error = (await response.json())["error"]
    assert error["code"] == "of_one_replica"
    assert remedy in error["message"]


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("/", f"path='/' is not served; there are {', '.join(OFFERED)}"),
        ("/chat/completions", "path='/chat/completions' is not served; did you mean /v1/chat/completions?"),
        ("/metrics/", "path='/metrics/' is not served; did you mean /metrics?"),
        ("/" + "x" * 5000, f"path='/{'x' * 99}...' is not served; there are {', '.join(OFFERED)}"),
    ],
    ids=["root", "without-v1", "slash", "long"],
)
async def test_a_path_that_is_not_there_is_told_as_a_replica_tells_it(
    path: str, want: str, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway()
    async with client.get(gateway.url + path) as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert error == {"message": want, "type": "invalid_request_error", "param": None, "code": "unknown_url"}


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"no HTTP at all\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /version HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\n\r\n", 500, "internal_error"),
    ],
    ids=["no-http", "long-header", "own-fault"],
)
async def test_what_the_http_server_refuses_is_an_error_like_any_other(
    sent: bytes, status: int, code: str, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway()
    gateway.application._version = {1, 2}  # type: ignore[assignment] # no JSON: a fault of our own
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert int(head.split()[1]) == status
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == code


async def test_health_ready_and_version(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway()

    async def get(path: str) -> tuple[int, Any]:
        async with client.get(gateway.url + path) as response:
            return response.status, await response.json()

    assert await get("/health") == await get("/ping") == (200, {"status": "ok"})
    assert await get("/version") == (200, {"version": "0.test", "component": "gateway"})
    gateway.application.pool.has_list = False
    assert await get("/ready") == (503, {"status": "no list of backends has come yet"})
    replica = await start_replica("a")
    gateway.application.pool.update([replica.entry("draining")])
    assert await get("/ready") == (200, {"status": "ready", "backends_ready": 0}), "requests wait here"
    gateway.application.pool.update([replica.entry()])
    assert await get("/ready") == (200, {"status": "ready", "backends_ready": 1})


async def test_own_paths_can_only_be_read(start_gateway: StartGateway, client: aiohttp.ClientSession) -> None:
    gateway = await start_gateway()
    async with client.post(f"{gateway.url}/metrics") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "GET, HEAD"
        error = (await response.json())["error"]
    assert error["code"] == "method_not_supported"
    assert error["message"] == "method='POST' is not allowed for /metrics; use GET"
    async with client.head(f"{gateway.url}/health") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/version", 200),
        ("GET", "/ready", 200),
        ("GET", "/metrics", 200),
        ("GET", "/admin/sample", 403),
        ("GET", "/no/such/path", 404),
        ("POST", "/health", 405),
    ],
)
async def test_every_own_answer_carries_the_requests_id(
    method: str, path: str, status: int, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway()
    url = gateway.url + path
    async with client.request(method, url, headers={"X-Request-Id": "mine-1"}) as response:
        assert response.status == status
        assert response.headers["X-Request-Id"] == "mine-1"
    async with client.request(method, url, headers={"X-Request-Id": "not usable"}) as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_metrics_say_what_happened(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    good, bad = await start_replica("good"), await start_replica("bad")
    gateway = await start_gateway(good, bad)
    await bad.stop()
    gateway.application.pool.update([good.entry(), bad.entry(), *(_entry_of(n) for n in range(2))])
    for _ in range(3):
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            assert response.status == 200
    good.streams_by_hand()
    pending = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await good.next_stream()
    async with client.get(f"{gateway.url}/metrics") as response:
        page = await response.text()
    await stream.head()
    await stream.end()
    (await pending).close()

    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = {
        (s.name, tuple(s.labels.values())): s.value for family in families.values() for s in family.samples
    }
    prefix = "headway_gateway_"
    assert values[f"{prefix}requests_received_total", ()] == 4
    assert values[f"{prefix}requests_forwarded_total", ()] == 3
    assert values[f"{prefix}requests_finished_total", ()] == 3
    assert values[f"{prefix}requests_retried_total", ("connect",)] == 1
    assert values[f"{prefix}in_flight", ()] == 1
    assert values[f"{prefix}waiting", ()] == 0
    assert values[f"{prefix}backends", ("ready",)] == 2
    assert values[f"{prefix}backends", ("draining",)] == 2
    assert values[f"{prefix}backend_in_flight", ("good",)] == 1
    assert values[f"{prefix}waited_seconds_count", ()] == 4
    assert values[f"{prefix}response_head_seconds_count", ()] == 3
    assert any(labels[-1:] == ("0.test",) or "0.test" in labels for name, labels in values if "info" in name)


def _entry_of(number: int) -> BackendEntry:
    return BackendEntry(f"leaving-{number}", "http://127.0.0.1:9", "draining")


async def test_the_sample_carries_what_the_controller_reads(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    client: aiohttp.ClientSession,
    key_file: Path,
    make_key: MakeKey,
) -> None:
    key = make_key()
    replace(key_file, key.public_pem)
    replica = await start_replica("a")
    gateway = await start_gateway(
        admin_public_key_file=key_file, admin_audience=AUDIENCE, waiting_timeout_seconds=20
    )
    waiting = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    await gateway.until(lambda: gateway.application.pool.num_waiting == 1)

    async def sample() -> Any:
        headers = {"Authorization": f"Bearer {token(key)}"}
        async with client.get(f"{gateway.url}/admin/sample", headers=headers) as response:
            assert response.status == 200
            assert int(response.headers["Content-Length"]) <= 4096
            return await response.json()

    got = await sample()
    assert (got["version"], got["kind"], len(got["instance"])) == (1, "gateway", 32)
    assert got["uptime_seconds"] > 0
    oldest = got["gauges"].pop("oldest_waiting_seconds")
    assert 0 < oldest < 20
    assert got["gauges"] == {"waiting": 1, "in_flight": 0, "backends": 0, "backends_ready": 0}
    gateway.application.pool.update([replica.entry()])
    (await waiting).close()
    later = await sample()
    assert later["instance"] == got["instance"]
    none = {"rejected": 0, "retried": 0, "failed": 0, "client_aborted": 0}
    assert later["counters"] == {"received": 1, "forwarded": 1, "finished": 1, **none}
    assert later["gauges"]["oldest_waiting_seconds"] == 0.0


async def test_without_a_key_file_the_admin_path_says_which_flag_enables_it(
    start_gateway: StartGateway, client: aiohttp.ClientSession, make_key: MakeKey
) -> None:
    gateway = await start_gateway()
    headers = {"Authorization": f"Bearer {token(make_key())}"}
    async with client.get(f"{gateway.url}/admin/sample", headers=headers) as response:
        assert response.status == 403
        assert "--admin-public-key-file" in (await response.json())["error"]["message"]


async def test_an_admin_call_without_a_good_token_is_unauthorised(
    start_gateway: StartGateway, client: aiohttp.ClientSession, key_file: Path, make_key: MakeKey
) -> None:
    replace(key_file, make_key().public_pem)
    gateway = await start_gateway(admin_public_key_file=key_file, admin_audience=AUDIENCE)
    for headers in ({}, {"Authorization": f"Bearer {token(make_key())}"}):
        async with client.get(f"{gateway.url}/admin/sample", headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_admin_token")


def hour() -> int:
    return int(time.time()) + 3600


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"aud": "default/other"}, "udience"),
        ({"iss": "somebody"}, "ssuer"),
        ({"exp": 1_000_000_000}, "expired"),
        ({"exp": hour()}, "lives"),
        ({"without": "exp"}, "exp"),
        ({"without": "aud"}, "aud"),
        ({"without": "iss"}, "iss"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) and "exp" not in value else None,
)
def test_a_token_with_a_wrong_claim_is_refused(
    changes: dict[str, Any], want: str, key_file: Path, make_key: MakeKey
) -> None:
    key = make_key()
    key_file.write_bytes(key.public_pem)
    keys = AdminKeys(key_file, AUDIENCE)
    keys.verify(f"Bearer {token(key)}")
    with pytest.raises(TokenError, match=want):
        keys.verify(f"Bearer {token(key, **changes)}")


@pytest.mark.parametrize("seconds_ahead", [-100, -50, 50])
def test_the_operators_clock_may_differ_by_a_minute(
    seconds_ahead: int, key_file: Path, make_key: MakeKey
) -> None:
    key = make_key()
    key_file.write_bytes(key.public_pem)
    then = int(time.time()) + seconds_ahead
    AdminKeys(key_file, AUDIENCE).verify(f"Bearer {token(key, iat=then, exp=then + 60)}")


@pytest.mark.parametrize("seconds_ahead", [-200, 90])
def test_a_token_of_a_clock_further_off_is_refused_with_what_to_do(
    seconds_ahead: int, key_file: Path, make_key: MakeKey
) -> None:
    key = make_key()
    key_file.write_bytes(key.public_pem)
    then = int(time.time()) + seconds_ahead
    with pytest.raises(TokenError, match="set the operator's clock"):
        AdminKeys(key_file, AUDIENCE).verify(f"Bearer {token(key, iat=then, exp=then + 60)}")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic eDp5", "Bearer nonsense", "Bearer a.b.c"]
)
def test_a_header_without_a_token_is_refused(header: str | None, key_file: Path, make_key: MakeKey) -> None:
    key_file.write_bytes(make_key().public_pem)
    with pytest.raises(TokenError):
        AdminKeys(key_file, AUDIENCE).verify(header)


def test_a_token_signed_with_the_public_key_as_a_secret_is_refused(key_file: Path, make_key: MakeKey) -> None:
    key = make_key()
    key_file.write_bytes(key.public_pem)
    now = int(time.time())
    claims = {"iss": "headway-operator", "aud": AUDIENCE, "exp": now + 30}
    for algorithm, secret in (("none", ""), ("HS256", "s" * 64)):
        with pytest.raises(TokenError):
            AdminKeys(key_file, AUDIENCE).verify(f"Bearer {jwt.encode(claims, secret, algorithm=algorithm)}")


def test_keys_are_rotated_by_replacing_the_file(key_file: Path, make_key: MakeKey) -> None:
    old, new, foreign = make_key(), make_key(), make_key()
    key_file.write_bytes(old.public_pem)
    keys = AdminKeys(key_file, AUDIENCE)
    keys.verify(f"Bearer {token(old)}")
    with pytest.raises(TokenError):
        keys.verify(f"Bearer {token(new)}")

    replace(key_file, old.public_pem + b"# a comment between\n" + new.public_pem)
    for key in (old, new):
        keys.verify(f"Bearer {token(key)}")
    with pytest.raises(TokenError):
        keys.verify(f"Bearer {token(foreign)}")

    replace(key_file, new.public_pem)
    keys.verify(f"Bearer {token(new)}")
    with pytest.raises(TokenError):
        keys.verify(f"Bearer {token(old)}")


@pytest.mark.parametrize("content", [b"", b"nonsense", None], ids=["empty", "nonsense", "gone"])
def test_a_key_file_that_turns_bad_keeps_the_last_good_keys(
    content: bytes | None, key_file: Path, make_key: MakeKey
) -> None:
    key = make_key()
    key_file.write_bytes(key.public_pem)
    keys = AdminKeys(key_file, AUDIENCE)
    if content is None:
        os.unlink(key_file)
    else:
        replace(key_file, content)
    keys.verify(f"Bearer {token(key)}")


def test_a_key_file_without_an_ed25519_key_stops_the_start(key_file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        AdminKeys(key_file, AUDIENCE)
    key_file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="holds no"):
        AdminKeys(key_file, AUDIENCE)
    key_file.write_bytes(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(ConfigError, match="damaged"):
        AdminKeys(key_file, AUDIENCE)
    public = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    key_file.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ConfigError, match="not Ed25519"):
        AdminKeys(key_file, AUDIENCE)

"""The admin API: who may use it, what it changes, and what it reports."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from headway_runtime.errors import ConfigError
from headway_runtime.server.admin_tokens import AdminTokens

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer


def pem(*keys: Ed25519PrivateKey) -> bytes:
    parts = [key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in keys]
    return b"".join(parts)


def token(key: Ed25519PrivateKey, audience: str = "a/b", lifetime_seconds: int = 60) -> str:
    now = int(time.time())
    claims = {"iss": "headway-operator", "aud": audience, "iat": now, "exp": now + lifetime_seconds}
    return "Bearer " + jwt.encode(claims, key, algorithm="EdDSA")


def get_sample(server: RunningServer, authorization: str | None) -> httpx.Response:
    headers = {} if authorization is None else {"Authorization": authorization}
    return httpx.get(f"{server.url}/admin/sample", headers=headers)


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": "default/other"},
        {"aud": None},
        {"iss": "somebody"},
        {"iss": None},
        {"exp": int(time.time()) - 100},
        {"exp": None},
        {"exp": int(time.time()) + 3600},
        {"nbf": int(time.time()) + 3600},
    ],
)
def test_a_token_with_other_claims_is_refused(fake_server: RunningServer, changes: dict[str, Any]) -> None:
    response = get_sample(fake_server, "Bearer " + fake_server.admin_token(**changes))
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_admin_token")


def test_a_token_that_nobody_signed_is_refused(fake_server: RunningServer) -> None:
    good = fake_server.admin_token()
    other = fake_server.admin_token(Ed25519PrivateKey.generate())
    now = int(time.time())
    claims = {"iss": "headway-operator", "aud": "default/demo", "exp": now + 60}
    shared = jwt.encode(claims, "x" * 64, algorithm="HS256")
    unsigned = jwt.encode(claims, "", algorithm="none")
    for authorization in (None, "", "Bearer", "Bearer x", good, f"Basic {good}"):
        assert get_sample(fake_server, authorization).status_code == 401
    for wrong in (other, shared, unsigned, good[:-4] + "AAAA"):
        assert get_sample(fake_server, f"Bearer {wrong}").status_code == 401
    assert get_sample(fake_server, f"Bearer {good}").status_code == 200


@pytest.mark.parametrize("seconds_ahead", [-100, -50, 50])
def test_the_operators_clock_may_differ_by_a_minute(fake_server: RunningServer, seconds_ahead: int) -> None:
    then = int(time.time()) + seconds_ahead
    token = fake_server.admin_token(iat=then, exp=then + 60)
    assert get_sample(fake_server, f"Bearer {token}").status_code == 200


@pytest.mark.parametrize("seconds_ahead", [-200, 90])
def test_a_token_of_a_clock_further_off_is_refused_with_what_to_do(
    fake_server: RunningServer, seconds_ahead: int
) -> None:
    then = int(time.time()) + seconds_ahead
    response = get_sample(fake_server, f"Bearer {fake_server.admin_token(iat=then, exp=then + 60)}")
    assert response.status_code == 401
    assert "set the operator's clock" in response.json()["error"]["message"]


def test_keys_rotate_without_a_restart(tmp_path: Path) -> None:
    old, new = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    path = tmp_path / "public.pem"
    path.write_bytes(pem(old))
    tokens = AdminTokens(path, "a/b")
    assert tokens.refusal(token(old)) is None
    assert tokens.refusal(token(new)) is not None

    # As Kubernetes does it: a new file under the same name.
    (tmp_path / "next").write_bytes(pem(new, old))
    os.replace(tmp_path / "next", path)
    assert tokens.refusal(token(old)) is None
    assert tokens.refusal(token(new)) is None

    path.write_bytes(b"broken")
    assert tokens.refusal(token(new)) is None, "a broken file changes nothing"
    path.unlink()
    assert tokens.refusal(token(new)) is None
    path.write_bytes(pem(new))
    assert tokens.refusal(token(old)) is not None


def test_a_key_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "public.pem"
    other_kind = generate_private_key(SECP256R1()).public_key()
    for content in (
        b"",
        b"nothing",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        other_kind.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="--admin-public-key-file"):
            AdminTokens(path, "a/b")
    with pytest.raises(ConfigError, match="missing"):
        AdminTokens(tmp_path / "missing", "a/b")


def test_limits_change_one_by_one_or_together(fake_server: RunningServer) -> None:
    first = fake_server.admin("GET", "limits").json()
    assert first == {
        "limits": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_speculative_tokens": 0},
        "envelope": {
            "max_num_seqs": [1, 64],
            "max_num_batched_tokens": [1, 2048],
            "num_speculative_tokens": [0, 0],
        },
        "targets": {"ttft_milliseconds": None, "tpot_milliseconds": None, "e2e_milliseconds": None},
    }
    answer = fake_server.admin("PATCH", "limits", {"max_num_seqs": 8}).json()
    assert answer["limits"] == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "num_speculative_tokens": 0,
    }
    changes = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "tpot_milliseconds": 50}
    answer = fake_server.admin("PATCH", "limits", changes).json()
    assert answer["limits"] == {"max_num_seqs": 1, "max_num_batched_tokens": 4, "num_speculative_tokens": 0}
    assert answer["targets"] == {
        "ttft_milliseconds": None,
        "tpot_milliseconds": 50.0,
        "e2e_milliseconds": None,
    }
    assert fake_server.admin("PATCH", "limits", {}).json() == answer
    assert fake_server.sample()["limits"] == answer["limits"]
    restored = fake_server.admin("PATCH", "limits", {**first["limits"], **first["targets"]}).json()
    assert restored == first


def test_targets_set_again_begin_nothing_anew(fake_server: RunningServer) -> None:
    epoch = fake_server.sample()["targets"]["epoch"]
    fake_server.admin("PATCH", "limits", {"ttft_milliseconds": 300})
    fake_server.admin("PATCH", "limits", {"ttft_milliseconds": 300.0, "max_num_seqs": 64})
    targets = fake_server.sample()["targets"]
    none = {"ttft_milliseconds": None, "tpot_milliseconds": None, "e2e_milliseconds": None}
    assert targets == none | {"ttft_milliseconds": 300.0, "epoch": epoch + 1}
    fake_server.admin("PATCH", "limits", {"ttft_milliseconds": None})
    targets = fake_server.sample()["targets"]
    assert targets == none | {"epoch": epoch + 2}


@pytest.mark.parametrize(
    ("body", "want_param", "want_range"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs", [1, 64]),
        ({"max_num_seqs": 65, "ttft_milliseconds": 5}, "max_num_seqs", [1, 64]),
        ({"max_num_batched_tokens": 10}, "max_num_batched_tokens", [64, 2048]),
        ({"max_num_batched_tokens": 2049}, "max_num_batched_tokens", [64, 2048]),
        ({"ttft_milliseconds": 0}, "ttft_milliseconds", [0, 3600000]),
        ({"max_num_seqs": 2.5}, "max_num_seqs", None),
        ({"max_num_seqs": None}, "max_num_seqs", None),
        ({"max_num_seqs": True}, "max_num_seqs", None),
        ({"tpot_milliseconds": "5"}, "tpot_milliseconds", None),
        ({"speculation": True}, "speculation", None),
    ],
)
def test_what_is_out_of_range_is_422_and_changes_nothing(
    fake_server: RunningServer, body: dict[str, Any], want_param: str, want_range: list[int] | None
) -> None:
    before = fake_server.admin("GET", "limits").json()
    response = fake_server.admin("PATCH", "limits", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, want_param)
    assert want_param in error["message"]
    if want_range is not None:
        assert (error["code"], error["value"], error["range"]) == (
            "out_of_range",
            body[want_param],
            want_range,
        )
    assert fake_server.admin("GET", "limits").json() == before


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "ttft_milliseconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**30, -(10**400), [], {}, "5"])
def test_what_is_no_sensible_number_is_422_by_name(
    fake_server: RunningServer, field: str, value: object
) -> None:
    headers = {"Authorization": f"Bearer {fake_server.admin_token()}"}
    content = json.dumps({field: value}).encode()
    response = httpx.patch(f"{fake_server.url}/admin/limits", content=content, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (422, field, "invalid_value")
    assert error["message"].startswith(f"{field}={repr(value)[:70]}")
    assert "; want" in error["message"]


def test_limits_may_be_written_as_numbers_without_a_fraction(fake_server: RunningServer) -> None:
    answer = fake_server.admin("PATCH", "limits", {"max_num_seqs": 64.0})
    assert (answer.status_code, answer.json()["limits"]["max_num_seqs"]) == (200, 64)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]"])
def test_a_patch_that_is_no_object_is_400(fake_server: RunningServer, raw: bytes) -> None:
    headers = {"Authorization": f"Bearer {fake_server.admin_token()}"}
    response = httpx.patch(f"{fake_server.url}/admin/limits", content=raw, headers=headers)
    assert response.status_code == 400

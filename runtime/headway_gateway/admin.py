"""Who may make admin calls, and the sample that the operator's controller reads.

A call carries a short-lived JWT signed by the operator's Ed25519 key; here lie only public keys, in a PEM
file that may hold several while keys are rotated. The file is read again when it has changed; a file that
turns bad keeps the last good keys.
"""

import logging
import re
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from headway_gateway.counters import Counters
from headway_gateway.errors import ConfigError, TokenError
from headway_gateway.pool import BackendPool

ISSUER = "headway-operator"
LONGEST_LIFE_SECONDS = 60
LEEWAY_SECONDS = 60  # by which the clocks of two nodes may differ
CLOCK_REMEDY = f"set the operator's clock and this node's, {LEEWAY_SECONDS} s apart at most"
_PEM_BLOCK = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
log = logging.getLogger(__name__)


class AdminKeys:
    """Verifies admin tokens for one audience against the keys of one file."""

    def __init__(self, path: Path, audience: str) -> None:
        """Raises ConfigError when the file holds no usable key."""
        self._path = path
        self._audience = audience
        self._seen = self._signature()
        self._keys = _read_keys(path)

    def verify(self, authorization: str | None) -> None:
        """Raises TokenError unless the header's token is genuine, current and for this service."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise TokenError("the admin API wants a bearer token signed by the operator")
        self._reload()
        failure: jwt.InvalidTokenError | None = None
        for key in self._keys:
            try:
                claims = self._decode(token.strip(), key)
            except jwt.InvalidSignatureError as error:
                failure = error  # another key may have signed it
            except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError) as error:
                raise TokenError(f"the admin token is not accepted: {error}; {CLOCK_REMEDY}") from None
            except jwt.InvalidTokenError as error:
                raise TokenError(f"the admin token is not accepted: {error}") from None
            else:
                _check_life(claims)
                return
        raise TokenError(f"the admin token is not accepted: {failure}")

    def _decode(self, token: str, key: Ed25519PublicKey) -> dict[str, Any]:
        return jwt.decode(
            token,
            key,
            algorithms=["EdDSA"],
            audience=self._audience,
            issuer=ISSUER,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "aud", "iss"]},
        )

    def _reload(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = _read_keys(self._path)
        except ConfigError as error:
            log.error("kept the last good admin keys: %s", error)

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def _check_life(claims: dict[str, Any]) -> None:
    seconds_left = float(claims["exp"]) - time.time()
    if seconds_left > LONGEST_LIFE_SECONDS + LEEWAY_SECONDS:
        raise TokenError(f"the admin token lives longer than {LONGEST_LIFE_SECONDS} s; sign a shorter one")


def _read_keys(path: Path) -> list[Ed25519PublicKey]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--admin-public-key-file={str(path)!r} cannot be read: {error}") from None
    keys = []
    for block in _PEM_BLOCK.findall(content):
        try:
            key = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"--admin-public-key-file={str(path)!r} holds a damaged key: {error}") from None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"--admin-public-key-file={str(path)!r} holds a key that is not Ed25519")
        keys.append(key)
    if not keys:
        raise ConfigError(
            f"--admin-public-key-file={str(path)!r} holds no '-----BEGIN PUBLIC KEY-----' block"
        )
    return keys


def sample(counters: Counters, pool: BackendPool, *, instance: str, uptime_seconds: float) -> dict[str, Any]:
    """The gateway's `/admin/sample`, version 1."""
    return {
        "version": 1,
        "kind": "gateway",
        "instance": instance,
        "uptime_seconds": round(uptime_seconds, 3),
        "gauges": {
            "waiting": pool.num_waiting,
            "oldest_waiting_seconds": round(pool.oldest_waiting_seconds(), 4),
            "in_flight": pool.num_in_flight,
            "backends": len(pool.backends),
            "backends_ready": pool.num_ready,
        },
        "counters": counters.totals(),
        "routing": pool.routing.to_dict(),
        "revisions": {
            revision: {
                "requests": counts.requests,
                "errors": counts.errors,
                "client_aborted": counts.client_aborted,
            }
            for revision, counts in counters.by_revision.items()
        },
    }

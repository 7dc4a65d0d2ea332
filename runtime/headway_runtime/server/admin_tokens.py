"""Who may use the admin API: bearers of a JWT signed by the operator, for this service, for a minute.

Holds only public keys. Their file is read again when it changes, so that keys rotate without a restart;
while it holds several keys, each of them is accepted. A file that is broken or gone changes nothing.
"""

import logging
import re
import time
from pathlib import Path

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from headway_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

ISSUER = "headway-operator"
LEEWAY_SECONDS = 60  # by which the clocks of two nodes may differ
LONGEST_LIFETIME_SECONDS = 60
CLOCK_REMEDY = f"set the operator's clock and this node's, {LEEWAY_SECONDS} s apart at most"
_PEM_BLOCK = re.compile(rb"-----BEGIN [^-]+-----.+?-----END [^-]+-----", re.DOTALL)


class AdminTokens:
    """Verifies tokens against the keys of one file. ConfigError if that file has no usable key at start."""

    def __init__(self, path: Path, audience: str) -> None:
        self._path = path
        self._audience = audience
        try:
            self._seen = self._version()
            self._keys = read_public_keys(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--admin-public-key-file={str(path)!r}: {error}; give a PEM file with Ed25519 public keys"
            ) from error

    def refusal(self, authorization: str | None) -> str | None:
        """Why the value of an Authorization header is not accepted; None if it is."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return "the admin API wants a bearer token signed by the operator"
        self._read_again_if_changed()
        reason = "no key"
        for key in self._keys:
            try:
                claims = jwt.decode(
                    token.strip(),
                    key,
                    algorithms=["EdDSA"],
                    audience=self._audience,
                    issuer=ISSUER,
                    leeway=LEEWAY_SECONDS,
                    options={"require": ["exp", "aud", "iss"]},
                )
            except jwt.InvalidSignatureError as error:
                reason = str(error)
                continue  # signed by another of the keys, perhaps
            except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError) as error:
                return f"the admin token is not accepted: {error}; {CLOCK_REMEDY}"
            except jwt.InvalidTokenError as error:
                return f"the admin token is not accepted: {error}"
            if claims["exp"] > time.time() + LONGEST_LIFETIME_SECONDS + LEEWAY_SECONDS:
                return f"the admin token lives longer than {LONGEST_LIFETIME_SECONDS} s; sign a shorter one"
            return None
        return f"the admin token is not accepted: {reason}"

    def _version(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read_again_if_changed(self) -> None:
        try:
            version = self._version()
            if version == self._seen:
                return
            self._keys = read_public_keys(self._path.read_bytes())
        except (OSError, ValueError) as error:
            logger.warning("%s: %s; the keys read before stay in force", self._path, error)
            return
        self._seen = version
        logger.info("%s: %d admin keys in force", self._path, len(self._keys))


def read_public_keys(pem: bytes) -> list[Ed25519PublicKey]:
    """All keys of a PEM file. ValueError if there is none, or one that is not Ed25519."""
    keys = []
    for block in _PEM_BLOCK.findall(pem):
        try:
            key = load_pem_public_key(block)
        except UnsupportedAlgorithm as error:
            raise ValueError(str(error)) from error
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError(f"holds a key of type {type(key).__name__}, want Ed25519")
        keys.append(key)
    if not keys:
        raise ValueError("holds no public key in PEM form")
    return keys

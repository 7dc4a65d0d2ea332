"""The operator's Ed25519 key pair: makes it, mints the short-lived JWTs of admin calls, states what to trust.

Replicas and gateways hold only the public keys; where the private key is kept (a Secret, or this process) is
the cluster implementation's business. Nothing here reads a file.

A pair takes the place of another in three steps, so that no pod ever gets a token that it cannot verify:

1. from the start, pods are told both public keys, and the old pair signs on;
2. after HANDOVER_SECONDS, when every kubelet has brought both keys to its pods, the new pair signs;
3. after as long again, the old public key is told no more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from headway_operator.errors import KeyPairError
from headway_operator.state import ServiceKey

ISSUER = "headway-operator"
TOKEN_LIFETIME_SECONDS = 60
# A kubelet looks after its pods' ConfigMaps once a minute, and may then go by what it read a minute before.
HANDOVER_SECONDS = 180.0


class Signer(Protocol):
    """What signs admin calls, and what pods are told to trust."""

    @property
    def public_pem(self) -> str:
        """The public keys, as PEM blocks."""

    def mint(self, key: ServiceKey, now: float) -> str:
        """A bearer token for the admin API of one service's children."""


@dataclass(frozen=True, slots=True)
class AdminKeys:
    """The key that signs, and every public key that replicas should accept (several while a key is rotated).

    public_pem: one or more PEM blocks; the signing key's own public half is always among them.
    """

    private_key: Ed25519PrivateKey
    public_pem: str

    @classmethod
    def generate(cls) -> "AdminKeys":
        """A fresh pair."""
        private_key = Ed25519PrivateKey.generate()
        return cls(private_key, _public_pem(private_key))

    @classmethod
    def from_pem(cls, private_pem: str, public_pem: str = "") -> "AdminKeys":
        """The pair stored as `private_pem`; `public_pem` may add the public keys of other signers.

        Raises KeyPairError when `private_pem` holds no Ed25519 private key.
        """
        try:
            private_key = load_pem_private_key(private_pem.encode(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise KeyPairError(
                f"private.pem: not an unencrypted PEM private key ({error}); "
                "delete it to have a new pair made"
            ) from error
        if not isinstance(private_key, Ed25519PrivateKey):
            raise KeyPairError(
                f"private.pem: want an Ed25519 key, got {type(private_key).__name__}; "
                "delete it to have a new pair made"
            )
        own_pem = _public_pem(private_key)
        others = public_pem.strip()
        if own_pem.strip() in others:
            return cls(private_key, others + "\n")
        return cls(private_key, own_pem + (others + "\n" if others else ""))

    def private_pem(self) -> str:
        """The private key as unencrypted PKCS #8 PEM, for the place that keeps it."""
        return self.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

    def mint(self, key: ServiceKey, now: float) -> str:
        """A bearer token for the admin API of one service's children, good for 60 s from `now`."""
        issued_at = int(now)
        claims = {
            "iss": ISSUER,
            "aud": str(key),
            "iat": issued_at,
            "exp": issued_at + TOKEN_LIFETIME_SECONDS,
        }
        return jwt.encode(claims, self.private_key, algorithm="EdDSA")


class KeyRing:
    """The pair that signs, and the one that takes its place while keys are rotated.

    clock: seconds that never go back.
    """

    def __init__(self, keys: AdminKeys, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest = keys
        self._older: AdminKeys | None = None
        self._since = 0.0

    @property
    def public_pem(self) -> str:
        """The newest pair's keys, and those of the one before it until nothing is signed with that."""
        if (older := self._older) is None or self._clock() - self._since >= 2 * HANDOVER_SECONDS:
            return self._newest.public_pem
        blocks = [block for block in _blocks(older.public_pem) if block not in self._newest.public_pem]
        return self._newest.public_pem + "".join(blocks)

    def mint(self, key: ServiceKey, now: float) -> str:
        """As `AdminKeys.mint`, with the pair whose turn it is."""
        if self._older is not None and self._clock() - self._since < HANDOVER_SECONDS:
            return self._older.mint(key, now)
        return self._newest.mint(key, now)

    def adopt(self, keys: AdminKeys) -> bool:
        """Go over to `keys`; whether they are another pair, or list other public keys, than the newest.

        Where one is replaced before its turn came, the pair that signs goes on until the newer one's turn.
        """
        if keys.private_pem() == self._newest.private_pem():
            is_other = keys.public_pem != self._newest.public_pem
            self._newest = keys
            return is_other
        if self._older is None or self._clock() - self._since >= HANDOVER_SECONDS:
            self._older = self._newest
        self._newest, self._since = keys, self._clock()
        return True


def _blocks(pem: str) -> list[str]:
    end = "-----END PUBLIC KEY-----\n"
    return [f"{block}{end}" for block in pem.split(end) if block.strip()]


def _public_pem(private_key: Ed25519PrivateKey) -> str:
    public_key = private_key.public_key()
    return public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

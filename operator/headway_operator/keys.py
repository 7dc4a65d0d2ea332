"""The operator's Ed25519 key pair: makes it, mints the short-lived JWTs of admin calls, states what to trust.

Replicas and gateways hold only the public keys; where the private key is kept (a Secret, or this process) is
the cluster implementation's business. Nothing here reads a clock or a file.
"""

from dataclasses import dataclass

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


def _public_pem(private_key: Ed25519PrivateKey) -> str:
    public_key = private_key.public_key()
    return public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

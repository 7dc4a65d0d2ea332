"""Who may use the model: the API keys given at start, compared in constant time."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever sent a request, as far as the server can tell. key_digest: None if it has no API keys."""

    key_digest: bytes | None = None


ANYBODY = Tenant()


class ApiKeys:
    """No keys: everyone may."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests of one length, so that not even a key's length shows in the time it takes.
        self._tenants = tuple(Tenant(_digest(key)) for key in keys)

    def tenant_of(self, authorization: str | None) -> Tenant | None:
        """Whose key the value of an Authorization header carries; None if it is nobody's."""
        if not self._tenants:
            return ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        found: Tenant | None = None
        # Every key is compared, whichever fits.
        for tenant in self._tenants:
            assert tenant.key_digest is not None
            if hmac.compare_digest(given, tenant.key_digest):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

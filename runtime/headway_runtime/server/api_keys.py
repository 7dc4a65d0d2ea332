"""Who may use the model: the API keys given at start, compared in constant time."""

import hashlib
import hmac
from collections.abc import Sequence


class ApiKeys:
    """No keys: everyone may."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests of one length, so that not even a key's length shows in the time it takes.
        self._digests = tuple(_digest(key) for key in keys)

    def allow(self, authorization: str | None) -> bool:
        """Whether the value of an Authorization header carries one of the keys."""
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        # Every key is compared, whichever fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

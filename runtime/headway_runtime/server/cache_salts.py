"""Who shares cached prefixes with whom: the salt that goes into every block's hash.

Two requests can use each other's cached prefixes only if their salts are equal. With API keys, each key has
a salt of its own, so that no tenant can find out by timing what another one has sent; what a client adds
itself parts its own cache further, and can never make its salt equal to another key's. Salts are keyed
hashes: the key itself goes nowhere, and every process of a server makes the same salts of the same keys.

Knows nothing of HTTP and of caches.
"""

import hashlib
import hmac


def cache_salt(key: bytes | None, wanted: str | None) -> str:
    """key: of the API key that the request came with; None if the server has none. wanted: the client's."""
    if key is None:
        return wanted or ""
    # One byte of difference between "nothing" and any text a client can send.
    purpose = b"none" if wanted is None else b"some" + wanted.encode("utf-8", "surrogatepass")
    return hmac.new(key, b"prefix-cache-salt:" + purpose, hashlib.sha256).hexdigest()

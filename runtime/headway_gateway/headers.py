"""Which headers pass through the gateway, in both directions; pure functions over header maps."""

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from multidict import CIMultiDict, MultiMapping

from headway_gateway.errors import HeaderError

WAITED = "X-Headway-Waited-Milliseconds"
REQUEST_ID = "X-Request-Id"
# Of a replica's requests, the share that waits too late to be answered in time; for the gateway alone.
LATE_SHARE = "X-Headway-Late-Share"
MAX_NUM_SEQS = "X-Headway-Max-Num-Seqs"
_SAID_TO_GATEWAYS = frozenset((LATE_SHARE.lower(), MAX_NUM_SEQS.lower()))
# What a replica takes over as well, so that both logs name a request alike.
_USABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")

# RFC 9110, 7.6.1: these are about one connection, not about the message.
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# Made anew: Host and Content-Length by the client library, the others here. Expect is answered here.
_REMADE = frozenset(
    ("host", "content-length", "expect", WAITED.lower(), REQUEST_ID.lower(), "x-forwarded-for")
)
_KEPT_FROM_REPLICAS = _HOP_BY_HOP | _REMADE
_KEPT_FROM_CLIENTS = _HOP_BY_HOP | _SAID_TO_GATEWAYS
# They may name the replica's own address.
_LOCATIONS = ("Location", "Content-Location")


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id where it is usable, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _USABLE_REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


def to_replica(headers: MultiMapping[str], *, request_id: str, peer: str | None) -> CIMultiDict[str]:
    """The request's headers for a replica, still without `WAITED`, which each attempt sets anew.

    Raises HeaderError for a value that cannot be passed on as it is.
    """
    dropped = _and_named_in_connection(_KEPT_FROM_REPLICAS, headers)
    forwarded = CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in dropped])
    forwarded[REQUEST_ID] = request_id
    already = ", ".join(headers.getall("X-Forwarded-For", ()))
    if peer:
        forwarded["X-Forwarded-For"] = f"{already}, {peer}" if already else peer
    elif already:
        forwarded["X-Forwarded-For"] = already
    host = headers.get("Host")
    if host:
        forwarded.setdefault("X-Forwarded-Host", host)
    forwarded.setdefault("X-Forwarded-Proto", "http")
    if garbled := garbled_in(forwarded):
        raise HeaderError(f"the value of the header {garbled[0]!r} is not UTF-8; encode it, or leave it out")
    return forwarded


def garbled_in(headers: MultiMapping[str]) -> list[str]:
    """The names of those whose bytes are not UTF-8: the HTTP library reads them, but would write less."""
    if all(map(str.isascii, headers.values())):
        return []
    return [name for name, value in headers.items() if not _is_utf8(value)]


def to_client(headers: MultiMapping[str], *, request_id: str) -> CIMultiDict[str]:
    """A replica's response headers for the client, without `garbled_in`.

    Content-Length stays: bodies pass as they are.
    """
    dropped = _and_named_in_connection(_KEPT_FROM_CLIENTS, headers)
    passed = CIMultiDict(
        [
            (name, value)
            for name, value in headers.items()
            if name.lower() not in dropped and (value.isascii() or _is_utf8(value))
        ]
    )
    for name in _LOCATIONS:
        if name in passed:
            passed[name] = _without_address(passed[name])
    passed[REQUEST_ID] = request_id
    return passed


def late_share_of(headers: Mapping[str, str]) -> float | None:
    """What a replica says; None where it says nothing of use."""
    if (said := headers.get(LATE_SHARE)) is None:
        return None
    try:
        share = float(said)
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None


def max_num_seqs_of(headers: Mapping[str, str]) -> int | None:
    """What a replica says; None where it says nothing of use."""
    if (said := headers.get(MAX_NUM_SEQS)) is None:
        return None
    try:
        number = int(said)
    except ValueError:
        return None
    return number if number > 0 else None


def _without_address(location: str) -> str:
    """The path of a location: its host is the replica's, which clients may not be able to reach."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "/"
    if not parts.scheme and not parts.netloc:
        return location
    return urlunsplit(("", "", "/" + parts.path.lstrip("/"), parts.query, parts.fragment))


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # each byte that is none was read as half a surrogate pair
        return False
    return True


def _and_named_in_connection(names: frozenset[str], headers: MultiMapping[str]) -> frozenset[str]:
    values = headers.getall("Connection", ())
    if not values:
        return names
    return names.union(token.strip().lower() for value in values for token in value.split(","))

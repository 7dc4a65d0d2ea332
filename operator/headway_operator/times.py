"""Times as Kubernetes writes them, and times that are unlike for unlike services."""

from datetime import UTC, datetime
from zlib import crc32

from headway_operator.names import ServiceKey


def timestamp(at: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, whole seconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """The reverse of `timestamp`."""
    return datetime.fromisoformat(text).timestamp()


def drawn_share(key: ServiceKey, at: float | str) -> float:
    """From 0 to 1, the same for the same service and time.

    By which what all services do now and then is done at times of their own: those that an operator has begun
    with all at once would else do it all at once every time.
    """
    return crc32(f"{key} {at}".encode()) / 2**32

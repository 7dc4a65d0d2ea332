"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def timestamp(at: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, whole seconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """The reverse of `timestamp`."""
    return datetime.fromisoformat(text).timestamp()

"""What answers over HTTP mean to who fetches: where bytes begin, what may go better later, how long to wait.

Knows the HTTP client and nothing of hubs or registries.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx2

from headway_runtime.sources.remote import CONNECT_SECONDS, READ_SECONDS, TransientError

TIMEOUT = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
# Too early, too many, and faults of the server or of those before it: 520 to 524 are of networks that deliver
# for others (nothing of use, refused, silent, not found, too slow), 529 is "too busy".
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


def is_transient(status: int) -> bool:
    """Whether the same question may be answered later."""
    return status in TRANSIENT


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait; a number or a date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def unreachable(error: httpx2.HTTPError, host: str) -> TransientError:
    """A question that got no answer, or no whole one."""
    said = str(error) or type(error).__name__
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return TransientError(f"{host} cannot be reached ({said})")
    if isinstance(error, httpx2.ReadTimeout):
        return TransientError(f"{host} sent nothing for {READ_SECONDS:g} s")
    return TransientError(f"the connection to {host} broke ({said})")


def offset_of(response: httpx2.Response, asked: int) -> int:
    """Where the bytes of an answer begin; 0 where the range that was asked for was passed over."""
    if response.status_code != 206:
        return 0
    unit, _, rest = response.headers.get("content-range", "").partition(" ")
    start = rest.partition("-")[0]
    if unit != "bytes" or not start.isdigit() or int(start) != asked:
        raise TransientError(
            f"asked for bytes from {asked} on, the answer has {response.headers.get('content-range')!r}"
        )
    return asked


def chunks_of(response: httpx2.Response) -> Iterator[bytes]:
    """The bytes as they are stored, as soon as they come: what has come is not lost with the connection."""
    return response.iter_raw()

"""The access log: one JSON object per request.

The access line is written by hand and not through a formatter of many fields, since there is one for every
request; its fields are the ones that somebody asks for when one request was slow.
"""

import logging

import msgspec

access_logger = logging.getLogger("headway.access")


class AccessEntry(msgspec.Struct, omit_defaults=True):
    """One finished HTTP request. Times are milliseconds; what does not apply is left out."""

    request_id: str
    method: str
    path: str
    status: int
    e2e_milliseconds: float = 0.0
    client: str | None = None
    streamed: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    waited_at_gateway_milliseconds: float | None = None
    ttft_milliseconds: float | None = None
    queue_milliseconds: float | None = None
    prefill_milliseconds: float | None = None
    first_decode_milliseconds: float | None = None
    tpot_milliseconds: float | None = None
    itl_p50_milliseconds: float | None = None
    itl_p95_milliseconds: float | None = None
    itl_p99_milliseconds: float | None = None
    outcome: str | None = None
    finish_reasons: list[str] | None = None


_encoder = msgspec.json.Encoder()


def log_access(entry: AccessEntry, *, quiet: bool) -> None:
    """Write `entry`; `quiet` ones (probes, scrapes) only at debug level."""
    level = logging.DEBUG if quiet else logging.INFO
    if access_logger.isEnabledFor(level):
        access_logger.log(level, "%s", _encoder.encode(entry).decode())

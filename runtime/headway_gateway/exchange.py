"""One client request while it is being proxied: what it is and how far it has come; owned by `proxy.py`."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDict

from headway_gateway.backend import Backend
from headway_gateway.held_bodies import HeldBody
from headway_gateway.relay import Relay


@dataclass(slots=True, eq=False)
class Exchange:
    """Times are of the event loop's clock; `received_at` is None until the request has been read whole."""

    request: web.BaseRequest
    request_id: str
    forwarded_headers: CIMultiDict[str]
    relay: Relay
    body: HeldBody  # until its answer begins
    # Without a limit at first; shutting down sets it, which ends the exchange wherever it is.
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    received_at: float | None = None
    head_at: float = 0.0  # of the latest answer
    is_over: bool = False
    # What came of earlier attempts.
    retry_reason: str | None = None
    refused_by: list[Backend] = field(default_factory=list)
    refusal: web.Response | None = None
    refusal_reason: str | None = None
    has_lost_a_replica: bool = False
    was_held: bool = False
    least_until: float = 0.0
    closed_by: set[Backend] = field(default_factory=set)
    awaited_revision: str | None = (
        None  # of the replica that an attempt has reached and not yet been counted of
    )

    def log_fields(self, backend: Backend | None = None) -> dict[str, object]:
        """What each log line about this request carries."""
        fields: dict[str, object] = {"request_id": self.request_id, "path": self.request.path}
        if backend is not None:
            fields["backend"] = backend.id
        return fields

"""The outermost layer of the server: what holds for every HTTP request, whatever its path.

Takes the time of arrival (less what a gateway says it waited), gives every request its id, counts what is in
flight, closes connections while draining, and writes the access line and the span. Plain ASGI: per message of
a stream it costs one comparison.
"""

import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from headway_runtime.server.lifecycle import Lifecycle
from headway_runtime.server.log import AccessEntry, log_access
from headway_runtime.server.tracing import RequestTracer
from headway_runtime.server.turnstile import Turnstile

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTEXT_KEY = "headway.request"
LONGEST_WAIT_MILLISECONDS = 600_000.0
# That are begun in one round of the event loop, half a millisecond each.
REQUESTS_PER_TURN = 4
MODEL_PATHS = ("/v1/", "/tokenize", "/detokenize")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the edge knows of a request. received_at: `time.monotonic()`, gateway waiting included.

    is_named: whether the client chose the id.
    """

    request_id: str
    is_named: bool
    received_at: float
    log: AccessEntry


class Edge:
    """Wraps the application."""

    def __init__(self, app: AsgiApp, lifecycle: Lifecycle, tracer: RequestTracer | None = None) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._tracer = tracer
        self._turnstile = Turnstile(REQUESTS_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_at = time.monotonic()
        context = _context(scope, arrived_at)
        scope[CONTEXT_KEY] = context
        log, lifecycle = context.log, self._lifecycle
        counts = is_model_work(scope["path"])

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", context.request_id.encode())]
                if lifecycle.is_draining:
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        if counts:
            lifecycle.request_begins()
        try:
            if counts:
                await self._turnstile.enter()
            await self._app(_as_get(scope), receive, send_with_headers)
        finally:
            if counts:
                lifecycle.request_ends()
            log.e2e_milliseconds = round((time.monotonic() - context.received_at) * 1000.0, 3)
            log_access(log, quiet=not counts)
            if self._tracer is not None and counts:
                self._tracer.request_ended(scope, context.received_at, log)


def is_model_work(path: str) -> bool:
    """Work for the model; everything else is probes, scrapes and administration."""
    return path.startswith(MODEL_PATHS)


def request_id_from(given: bytes | None) -> str:
    """The id that a request's header gives it, where it is usable, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(request_id := given.decode("latin-1")):
        return request_id
    return uuid.uuid4().hex


def _as_get(scope: Scope) -> Scope:
    """HEAD asks for what GET would answer, without the body; which who writes the answer leaves out."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _context(scope: Scope, arrived_at: float) -> RequestContext:
    given = waited = None
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value
        elif name == b"x-headway-waited-milliseconds":
            waited = value
    request_id = request_id_from(given)
    is_named = given is not None and request_id.encode() == given
    waited_milliseconds = _waited_milliseconds(waited)
    client = scope.get("client")
    log = AccessEntry(
        request_id=request_id,
        method=scope["method"],
        path=scope["path"],
        status=0,
        client=client[0] if client else None,
        waited_at_gateway_milliseconds=waited_milliseconds or None,
    )
    return RequestContext(request_id, is_named, arrived_at - waited_milliseconds / 1000.0, log)


def _waited_milliseconds(value: bytes | None) -> float:
    """What the gateway's header says, bounded; 0 where it is missing or no number."""
    try:
        waited = float(value or b"0")
    except ValueError:
        return 0.0
    # The comparison is false for NaN, too.
    return min(waited, LONGEST_WAIT_MILLISECONDS) if waited > 0.0 else 0.0

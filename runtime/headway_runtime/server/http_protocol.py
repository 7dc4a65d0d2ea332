"""One connection: uvicorn's HTTP/1.1 protocol, with limits on what comes in and a short way out for chunks.

Limits: connections at a time (`places` says who has to go), size and number of a request's headers, and the
time they may take. Who exceeds one gets an error body like any other, and the connection is closed. Limits on
bodies are the application's.

One connection too many is refused when its request's head has come, not before: many clients take an answer
to nothing, or the end of what they can read, for a broken connection.

Of requests with a body that come at once, a few are parsed in each round of the event loop. Probes and
scrapes, which have none, do not wait behind them, not even on connections that are yet to be accepted.

The short way: `ChunkWriter`, found in the ASGI scope, writes a chunk of a response that has begun, outside of
any task and past all layers of the application. Whoever cannot use it (the client reads too slowly, the
response has not begun or is to end) sends the ASGI message as usual.
"""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headway_runtime.metrics import RejectReason
from headway_runtime.server.edge import CONTEXT_KEY, RequestContext, is_model_work, request_id_from
from headway_runtime.server.http_errors import HttpError, overloaded
from headway_runtime.server.http_options import HttpOptions
from headway_runtime.server.log import AccessEntry, log_access
from headway_runtime.server.places import Places
from headway_runtime.server.reject_reasons import asks_for_model, reason_of
from headway_runtime.server.turnstile import Turnstile

WRITER_KEY = "headway.chunk_writer"
# How long what a refused client still sends is read and thrown away: closing at once would make its system
# drop the answer unread.
LINGER_SECONDS = 2.0
# That are parsed in one round of the event loop, an eighth of a millisecond each.
REQUESTS_PER_TURN = 8
# How long a connection without a place may take to ask for something.
PLACELESS_SECONDS = 1.0


class ChunkWriter:
    """Writes chunks of one response at once.

    The response knows it through its scope and is not known back but weakly: each circle of references would
    keep all that a request has made until the garbage collector finds it, which holds up every stream.
    """

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)
        self._transport = cycle.transport

    @property
    def is_open(self) -> bool:
        """Whether `write` may be called: the response has begun and not ended, and the client reads it."""
        cycle = self._cycle()
        return bool(
            cycle is not None
            and cycle.chunked_encoding
            and cycle.response_started
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and not cycle.disconnected
        )

    def write(self, body: bytes) -> None:
        """Write `body`, which must not be empty, as one chunk."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class ServerProtocol(HttpToolsProtocol):
    """What uvicorn makes for every connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        options: HttpOptions,
        places: Places,
        turnstile: Turnstile,
        report_refused: Callable[[RejectReason], None],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._report_refused = report_refused
        # Of the request whose headers are being read.
        self.url = b""
        self._options = options
        self._places = places
        self._turnstile = turnstile
        # What has come while a request waits for its turn to be parsed.
        self._held: list[bytes] = []
        self._is_refused = False
        # Of the request whose headers are being read: bytes and headers so far.
        self._is_in_head = True
        self._num_raw_bytes = 0
        self._num_head_bytes = 0
        self._num_headers = 0
        self._timer: asyncio.TimerHandle | None = None
        # Bytes of a body that the parser does not see.
        self._num_unparsed = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been asked that is not answered."""
        return self._num_raw_bytes == 0 and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._turnstile.make_way()
        has_place = self._places.enter(self, self.loop.time())
        self._start_timer(self._options.header_timeout_seconds if has_place else PLACELESS_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._held.clear()
        self._places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held.append(data)
        elif self.is_idle and data.startswith(b"POST "):
            # It counts as at work, not as one that rests and may be closed.
            self._unset_keepalive_if_required()
            self._places.works(self)
            self._held.append(data)
            self.flow.pause_reading()
            self._turnstile.run(self._take_held)
        else:
            self._take(data)

    def shutdown(self) -> None:
        """The server ends: what has come is still answered."""
        self._take_held()
        super().shutdown()

    def _take_held(self) -> bool:
        """It is this request's turn to be parsed; whether it still wants to be."""
        held, self._held = self._held, []
        if not held or self.transport.is_closing():
            return False
        self.flow.resume_reading()
        self._take(b"".join(held))
        return True

    def _take(self, data: bytes) -> None:
        if self._num_unparsed:
            self._take_unparsed(data)
            return
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._places.works(self)
        if self._is_in_head:
            self._num_raw_bytes += len(data)
            if self._timer is None:
                self._start_timer(self._options.header_timeout_seconds)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # No other protocol is spoken here: the request is answered as what it is, and is the last one.
            self.cycle.keep_alive = False
            self._is_refused = True
            self._take_unparsed(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self._is_refused:
                self._refuse(
                    HttpError(400, f"this is not valid HTTP ({error}); send HTTP/1.1", code="invalid_http")
                )
            return
        if self._is_in_head and self._num_raw_bytes > self._options.max_header_bytes:
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        self._num_head_bytes = self._num_headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._num_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value) + 4
        options = self._options
        if self._num_headers > options.max_header_count or self._num_head_bytes > options.max_header_bytes:
            self._refuse(self._head_too_large())
            raise ValueError("the parser is to stop")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._num_head_bytes > self._options.max_header_bytes:  # a long path and no header
            self._refuse(self._head_too_large())
            raise ValueError("the parser is to stop")
        # A place may have become free meanwhile.
        if self._places.is_turned_away(self) and not self._places.find(self, self.loop.time()):
            self._refuse(self._no_place())
            raise ValueError("the parser is to stop")
        self._is_in_head = False
        self._num_raw_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        self.url = b""
        self.scope["extensions"] = {WRITER_KEY: ChunkWriter(self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            # The parser takes what follows for the other protocol's; it is this request's body.
            declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
            if declared != b"0":
                self._num_unparsed = int(declared)
                return
        self._is_in_head = True
        super().on_message_complete()
        self.headers = []  # the request has its own reference; what comes next has not said anything yet

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle:
            self._places.rests(self, self.loop.time())

    def close(self) -> None:
        """End: another connection needs the place."""
        self.transport.close()

    def turn_out(self) -> None:
        """Say that there is no place, and end without waiting for what else comes."""
        if not self._is_refused:
            self._refuse(self._no_place())
        self.transport.close()

    def _take_unparsed(self, data: bytes) -> None:
        """A part of a body that the parser has left alone."""
        if self._num_unparsed == 0:
            return
        part = data[: self._num_unparsed]
        self._num_unparsed -= len(part)
        self.on_body(part)
        if self._num_unparsed == 0:
            super().on_message_complete()

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self._places.is_turned_away(self):
            self._refuse(self._no_place())
            return
        if self._num_raw_bytes == 0:
            self.transport.close()  # connected, and never asked for anything
            return
        seconds = self._options.header_timeout_seconds
        message = f"the headers did not arrive within {seconds:g} s; send them faster"
        self._refuse(HttpError(408, message, code="request_timeout"))

    def _no_place(self) -> HttpError:
        most = self._places.num_places
        return overloaded(f"{most} connections are open; retry in a second", "connections", 1)

    def _head_too_large(self) -> HttpError:
        options = self._options
        return HttpError(
            431,
            f"the request line and headers are more than {options.max_header_bytes} bytes or "
            f"{options.max_header_count} headers; send less",
            code="headers_too_large",
        )

    def _refuse(self, error: HttpError) -> None:
        """Answer with `error` what has come last, read no more of it, and close."""
        self._is_refused = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False  # an earlier request is being answered, which is the last thing said
                return
            # The fault is in the body of the request that is being worked on.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        body, request_id = error.body(), self._request_id()
        if cycle is None or cycle.response_complete:
            self._note_refusal(error, request_id)
        headers = {**error.headers, "x-request-id": request_id}
        lines = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body),
            *(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in headers.items()),
            b"\r\n",
            body,
        ]
        self.transport.write(b"".join(lines))
        if self.transport.can_write_eof():  # TLS has no half of a connection to close
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _note_refusal(self, error: HttpError, request_id: str) -> None:
        """Count and log a request that no application has seen, as far as its head has come."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        method = self.parser.get_method().decode("latin-1") if path else ""
        client = self.client[0] if self.client else None
        entry = AccessEntry(request_id, method, path, error.status, client=client)
        log_access(entry, quiet=not is_model_work(path))
        reason = reason_of(error)
        if reason is not None and asks_for_model(method, path):
            self._report_refused(reason)

    def _request_id(self) -> str:
        """Of the request that is worked on or has come in part; a new one if it has not said any."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            context = cycle.scope.get(CONTEXT_KEY)
            if isinstance(context, RequestContext):
                return context.request_id
        return request_id_from(dict(self.headers or ()).get(b"x-request-id"))

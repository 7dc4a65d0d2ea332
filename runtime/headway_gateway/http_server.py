"""aiohttp's server, whose own refusals (what is no HTTP, a bug of ours) are errors like all others.

And with what it lacks: a head has a time and a size, all its lines together. A connection between two
requests is aiohttp's to close. While a body is read, or an answer written, none of this holds: those have
limits of their own. Who closes its half of the connection after a request gets the answer, but for HTTP/1.0,
which knows no interim responses (`client_watch.py`): there it counts as gone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage, InvalidURLError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from headway_gateway import replies
from headway_gateway.client_watch import COMMENT, INTERIM, Watch
from headway_gateway.connections import Connections
from headway_gateway.headers import REQUEST_ID, request_id_of

LONGEST_HEADER_BYTES = 65536
MOST_HEADERS = 256  # as a replica takes
MOST_HEAD_BYTES = 65536
HEAD_TIMEOUT_SECONDS = 15.0
KEEP_ALIVE_SECONDS = 75.0  # as a replica has it
# How long a connection without a place may take to ask for something.
PLACELESS_SECONDS = 5.0


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Server(web.Server):
    """Makes a protocol for each connection, of which `connections` keeps count."""

    def __init__(self, handler: Handler, connections: Connections, **options: Any) -> None:
        super().__init__(handler, **options)
        self._places = connections

    def __call__(self) -> web.RequestHandler:
        """As aiohttp's, which offers no other way to have another protocol."""
        return _Protocol(self, self._places, loop=self._loop, **self._kwargs)


log = logging.getLogger(__name__)


class HeadTooLargeError(Exception):
    """More bytes of one request's head than may come."""


class HeadTimeoutError(Exception):
    """A request's head began, and has not ended in time."""


class _Protocol(web.RequestHandler):
    __slots__ = (
        "_connections",
        "_head_bytes",
        "_head_timer",
        "_is_half_closed",
        "_is_refused",
        "_latest_body",
        "_num_answered",
        "_watch",
        "takes_comments",
    )

    def __init__(
        self,
        manager: web.Server,
        connections: Connections,
        *,
        loop: asyncio.AbstractEventLoop,
        **options: Any,
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._connections = connections
        self._head_bytes = 0  # of a head of which the end has not come
        self._head_timer: asyncio.TimerHandle | None = None
        self._latest_body: StreamReader = EMPTY_PAYLOAD
        self._is_refused = False
        self._is_half_closed = False
        self._num_answered = 0
        self.takes_comments: Callable[[], bool] | None = None
        self._watch: Watch | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As aiohttp's."""
        super().connection_made(transport)
        assert self.transport is not None
        self._watch = Watch(self._loop, self.transport, self._is_blind, self._question)
        if not self._connections.enter(self, self._loop.time()):
            self._loop.call_later(PLACELESS_SECONDS, self._time_out_placeless)

    def eof_received(self) -> bool:  # type: ignore[override] # aiohttp's always lets the connection end
        """The client sends no more: whether the connection stays open for the rest of its answers."""
        if self._head_bytes or not self._latest_body.is_eof() or not self._has_requests_in_hand():
            return False
        current = self._current_request
        if current is not None and current.version < HttpVersion11:
            return False
        self._is_half_closed = True
        if self._watch is not None:
            self._watch.begin(at_once=True)
        return True

    def data_received(self, data: bytes) -> None:
        """As aiohttp's, which tells of a head only once it is whole."""
        if self._is_refused:
            return
        num_heads, was_in_body = self._request_count, not self._latest_body.is_eof()
        super().data_received(data)
        if self._request_count > num_heads:
            self._end_head()
            self._connections.works(self)
            # The next head may have begun with the same bytes; from its next ones on it counts.
            self._latest_body = self._messages[-1][1]
        elif not (was_in_body or self._buffer_paused or self._force_close or self._close):
            if not self._head_bytes and not data.strip(b"\r\n"):
                return  # empty lines before a head are nothing
            self._connections.works(self)
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, HeadTooLargeError())
            elif self._head_timer is None:
                self._head_timer = self._loop.call_later(HEAD_TIMEOUT_SECONDS, self._time_out)

    def connection_lost(self, exc: BaseException | None) -> None:
        """As aiohttp's."""
        self._end_head()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._connections.leave(self)
        super().connection_lost(exc)

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Handler,
    ) -> tuple[web.StreamResponse, bool]:
        """As aiohttp's, from a request's turn to the end of its answer."""
        # A head that came whole at once may be too large as well.
        if sum(map(len, chain.from_iterable(request.raw_headers))) > MOST_HEAD_BYTES:
            request_handler = _refuse_head
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            self._num_answered += 1
            self.takes_comments = None
            if self._is_half_closed and not self._has_requests_in_hand():
                self.close()  # nothing more will come
            elif not (self._has_requests_in_hand() or self._head_bytes):
                self._connections.rests(self, self._loop.time())

    def give_way(self) -> None:
        """End at once: another connection comes."""
        self.force_close()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001 - aiohttp's
        """As aiohttp's, which parses nothing once more for each piece of a body that is read."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _pause_transport_reading(self) -> None:
        super()._pause_transport_reading()
        if self._watch is not None and self._has_requests_in_hand():
            self._watch.begin(at_once=False)

    def _has_requests_in_hand(self) -> bool:
        return self._request_count > self._num_answered  # some are in nobody's hand for a moment

    def _is_blind(self) -> bool:
        is_read = not (self._is_half_closed or self._reading_paused or self._buffer_paused)
        return not is_read and self._has_requests_in_hand()

    def _question(self) -> bytes:
        current = self._current_request
        if current is None or current.version < HttpVersion11 or not current.content.is_eof():
            return b""
        if current.writer.output_size == 0:
            return INTERIM
        return COMMENT if self.takes_comments is not None and self.takes_comments() else b""

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        if self._request_in_progress or self._messages:  # it is read after what came before it
            self._head_timer = self._loop.call_later(HEAD_TIMEOUT_SECONDS, self._time_out)
        else:
            self._refuse(408, HeadTimeoutError())

    def _time_out_placeless(self) -> None:
        if self._request_count == 0 and not self._connections.has_place(self, self._loop.time()):
            self.force_close()

    def _refuse(self, status: int, error: Exception) -> None:
        """Answer so, after what came before; nothing more is read."""
        self._end_head()
        self._is_refused = True
        self._messages.append((_ErrInfo(status, error, str(error)), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp logs it, and raises where an answer has begun; the rest of its answer is replaced."""
        if isinstance(exc, HeadTimeoutError | HeadTooLargeError):
            log.warning("answered %d: %s from %s", status, type(exc).__name__, request.remote)
        else:
            super().handle_error(request, status, exc, message)
        return _and_close(request, _refusal(status, exc))


def set_comments(request: web.BaseRequest, takes_comments: Callable[[], bool] | None) -> None:
    """takes_comments: whether a comment can stand in the request's answer now; None where none ever can."""
    if isinstance(request.protocol, _Protocol):
        request.protocol.takes_comments = takes_comments


async def _refuse_head(request: web.BaseRequest) -> web.StreamResponse:
    return _and_close(request, _refusal(431, HeadTooLargeError()))


def _and_close(request: web.BaseRequest, response: web.Response) -> web.Response:
    response.headers[REQUEST_ID] = request_id_of(request.headers)
    replies.let_pages_read(response, request)
    response.force_close()
    return response


def _refusal(status: int, error: BaseException | None) -> web.Response:
    if isinstance(error, LineTooLong):
        return replies.error_response(
            431,
            f"the request line or a header is more than {LONGEST_HEADER_BYTES} bytes; send less",
            code="headers_too_large",
        )
    if status >= 500:
        return replies.error_response(
            status, f"internal error: {type(error).__name__}", code="internal_error"
        )
    if isinstance(error, HeadTimeoutError):
        return replies.error_response(
            status,
            f"the request's headers did not arrive within {HEAD_TIMEOUT_SECONDS:g} s; send them faster",
            code="request_timeout",
        )
    if isinstance(error, HeadTooLargeError):
        return replies.error_response(
            status,
            f"the request's headers have more than {MOST_HEAD_BYTES} bytes together; send less",
            code="headers_too_large",
        )
    # The rest of the parser's message shows what was sent, which may be a secret.
    found = error.message.partition("\n")[0].rstrip(":") if isinstance(error, BadHttpMessage) else "no HTTP"
    if found.startswith("Too many headers"):
        return replies.error_response(
            431, f"the request has more than {MOST_HEADERS} headers; send fewer", code="headers_too_large"
        )
    if "can't be present with" in found:
        why = "Content-Length and Transfer-Encoding both say how long the body is; send one of them"
    elif isinstance(error, InvalidURLError):
        why = "the path has a byte that no URL may have; encode it as %XX"
    else:
        why = f"this is not valid HTTP ({found}); send HTTP/1.1"
    return replies.error_response(status, why, code="invalid_http")

"""A lean HTTP/1.1 client for many streamed answers at once; knows nothing of what is in them.

Why not aiohttp: at 500 streamed answers a second it takes about twice the processor time, and it wakes a task
for each piece of an answer, whose time is then taken late on a busy core (`benchmarks/bench/results.md` has
both). Here the time is taken in `data_received`, before anything else. Parsing is httptools'.

An idle connection is used again for `KEEP_ALIVE_SECONDS`, which is less than servers keep theirs (uvicorn: 5
s): so it is this side that lets go, no request meets a connection just closed, and none needs to be sent
twice.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from headway_bench.errors import OptionsError

KEEP_ALIVE_SECONDS = 4.0
KEPT_BODY_BYTES = 4096
_DEFAULT_PORTS = {"http": 80, "https": 443}


class ConnectError(Exception):
    """No connection: nothing of the request was sent."""


class DisconnectedError(Exception):
    """The connection ended before the answer did."""


class ProtocolError(Exception):
    """What came is not HTTP."""


class Receiver(Protocol):
    """Takes an answer's body, piece by piece, with the `time.perf_counter()` at which each piece arrived."""

    def feed(self, data: bytes, at_seconds: float) -> None:
        """One piece of the body of an answer whose status is 200."""


@dataclass(slots=True)
class Response:
    """An answer's head, filled in as it comes. `body` holds the beginning of an answer other than 200."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended_at_seconds: float = 0.0
    connect_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `path_prefix` has no slash at its end."""

    scheme: str
    host: str
    port: int
    path_prefix: str


def parse_base_url(url: str) -> Address:
    """`http://host:port[/prefix][/v1]` to its parts; a `/v1` at the end is dropped, paths bring their own."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise OptionsError(f"--base-url={url!r}: {error}") from error
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise OptionsError(f"--base-url={url!r} is no http:// or https:// address")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme], prefix)


class _Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.is_usable = True
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0

    async def exchange(self, head: bytes, body: bytes, receiver: Receiver, response: Response) -> None:
        """Send a request; return when its answer has ended. Leaves the connection closed when it fails."""
        assert self.transport is not None, "connected before use"
        self._receiver, self._response = receiver, response
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            self.transport.write(body)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._receiver = self._response = self._done = None

    def close(self) -> None:
        """Let go at once, whatever is still under way."""
        self.is_usable = False
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._response is None:
            self.close()  # an answer to nothing
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            self._fail(ProtocolError(f"{type(cause).__name__}: {cause}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._now = time.perf_counter()
        response = self._response
        if exc is None and response is not None and response.status and not self._is_delimited():
            self.on_message_complete()  # such an answer ends with its connection
        self._fail(DisconnectedError(str(exc) if exc else "the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._response is not None
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        response = self._response
        assert response is not None
        if response.status == 200 and self._receiver is not None:
            self._receiver.feed(body, self._now)
        elif len(response.body) < KEPT_BODY_BYTES:
            response.body += body[:KEPT_BODY_BYTES]

    def on_message_complete(self) -> None:
        if self._response is None or 100 <= self._response.status < 200:
            return
        self._response.ended_at_seconds = self._now
        self.is_usable = self.is_usable and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _is_delimited(self) -> bool:
        assert self._response is not None
        headers = self._response.headers
        return "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()

    def _fail(self, error: Exception) -> None:
        self.is_usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Client:
    """All connections to one server. Time limits are the caller's, by `asyncio.timeout`."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        if address.port != _DEFAULT_PORTS[address.scheme]:
            host = f"{host}:{address.port}"
        own = {"Host": host, "Accept-Encoding": "identity", "User-Agent": "headway-bench", **headers}
        self.base_url = f"{address.scheme}://{host}{address.path_prefix}"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in own.items()) + "\r\n"
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[_Connection] = []
        self.num_opened = 0

    async def post(self, path: str, body: bytes, receiver: Receiver, response: Response) -> None:
        """Send JSON; the answer goes to `receiver` (status 200) or into `response`.

        Raises ConnectError, DisconnectedError or ProtocolError; cancelling it closes the connection.
        """
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        await self._exchange(
            f"POST {self._address.path_prefix}{path} HTTP/1.1\r\n{length}", body, receiver, response
        )

    async def get(self, path: str, receiver: Receiver, response: Response) -> None:
        """As `post`, without a body."""
        await self._exchange(f"GET {self._address.path_prefix}{path} HTTP/1.1\r\n", b"", receiver, response)

    def close(self) -> None:
        """Close the idle connections; those in use close when their exchange is cancelled or ends."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, start: str, body: bytes, receiver: Receiver, response: Response) -> None:
        connection = self._take_idle()
        if connection is None:
            began = time.perf_counter()
            connection = await self._open()
            response.connect_seconds = time.perf_counter() - began
        await connection.exchange((start + self._head).encode("latin-1"), body, receiver, response)
        if connection.is_usable:
            connection.idle_since = time.perf_counter()
            self._idle.append(connection)
        else:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        """The one used last, so that those not needed grow old and are closed."""
        oldest = time.perf_counter() - KEEP_ALIVE_SECONDS
        while self._idle and (not self._idle[0].is_usable or self._idle[0].idle_since < oldest):
            self._idle.pop(0).close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._address.host, self._address.port, ssl=self._ssl
            )
        except OSError as error:
            raise ConnectError(f"{type(error).__name__}: {error}") from error
        self.num_opened += 1
        return connection

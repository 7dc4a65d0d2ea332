"""Sends one request to one replica and says what became of the attempt, up to the answer's head.

Four ends: a response whose head has arrived; NotAcceptedError, when no replica can have taken the request
(no connection, or one that `evidence.py` proves dead); ReplicaDiedError, when one may have, and closed the
connection; AnswerError, when it is silent or says what is no answer. Never tries twice.

Connections are kept alive for less long than replicas keep theirs (75 s), so that it is this side
which lets go of idle ones. A node that is lost closes none: where nothing of it, not even an acknowledgement,
comes for `LOST_NODE_SECONDS`, the kernel ends the connection, and that is a death like any other.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import AddrInfoType, Connection
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from yarl import URL

from headway_gateway.errors import AnswerError, NotAcceptedError, ReplicaDiedError
from headway_gateway.evidence import Evidence
from headway_gateway.held_bodies import HeldBody

CONNECT_TIMEOUT_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 30.0
LOST_NODE_SECONDS = 15
PROBE_SECONDS = 5
# Longer bodies go out in pieces of this size, each of them once the ones before have left.
PIECE_BYTES = 64 * 1024
LONGEST_REFUSAL_BYTES = 64 * 1024
REFUSAL_TIMEOUT_SECONDS = 2.0
_OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(slots=True)
class _Attempt:
    """What the connector tells the request it connects for; it knows the request only by its context."""

    on_connected: Callable[[], None] | None
    evidence: Evidence | None = None

    def close(self) -> None:
        """Forget all: the task has the context, the context this, and what is told may know the task."""
        self.on_connected = None
        if self.evidence is not None:
            self.evidence.close()
            self.evidence = None


_attempt: ContextVar[_Attempt] = ContextVar("_attempt")


class _Protocol(ResponseHandler):
    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001 - aiohttp's
        """As aiohttp's, which parses nothing once more for each piece of an answer that is read."""
        if self._reading_paused:
            super().resume_reading(resume_parser)


class WitnessConnector(aiohttp.TCPConnector):
    """A connector that takes evidence of each connection before the request is written to it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # aiohttp offers no other way to have another protocol.
        self._factory = functools.partial(_Protocol, loop=self._loop)  # type: ignore[assignment] # a subclass

    async def connect(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the signature is aiohttp's
    ) -> Connection:
        """As aiohttp's; runs in the task that sends the request."""
        connection = await super().connect(req, traces, timeout)
        attempt = _attempt.get()
        if attempt.on_connected is not None:
            attempt.on_connected()
        transport = connection.transport
        if transport is not None and not transport.is_closing():
            raw = transport.get_extra_info("socket")
            with contextlib.suppress(OSError):  # no file descriptor left: then nothing can be proven
                attempt.evidence = Evidence(raw.fileno(), raw.family)
        return connection


def make_connector() -> WitnessConnector:
    """The connector of a gateway: as many connections as there are requests, each of them watched."""
    return WitnessConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_watched_socket)


def _watched_socket(address: AddrInfoType) -> socket.socket:
    """A socket whose connection the kernel ends where the other side's kernel is gone."""
    family, kind, protocol, _, _ = address
    watched = socket.socket(family, kind, protocol)
    try:
        watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", PROBE_SECONDS),
            ("TCP_KEEPINTVL", PROBE_SECONDS),
            ("TCP_KEEPCNT", LOST_NODE_SECONDS // PROBE_SECONDS - 1),
            # Where data is under way nothing is probed.
            ("TCP_USER_TIMEOUT", LOST_NODE_SECONDS * 1000),
        ):
            if hasattr(socket, name):  # each platform lacks another one
                watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except BaseException:
        watched.close()
        raise
    return watched


class Upstream:
    """The connections to all replicas. Open it inside the running loop, close it at the end."""

    def __init__(self, idle_timeout_seconds: float, connector: aiohttp.TCPConnector | None = None) -> None:
        self._idle_timeout_seconds = idle_timeout_seconds
        self._session = aiohttp.ClientSession(
            connector=connector or make_connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_OWN_HEADERS,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=idle_timeout_seconds
            ),
            max_line_size=65536,
            max_field_size=65536,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def send(
        self,
        method: str,
        url: str,
        headers: CIMultiDict[str],
        body: HeldBody | None,
        on_connected: Callable[[], None],
    ) -> aiohttp.ClientResponse:
        """The response, its head read and its body to come; the caller leaves it with `async with`.

        `url` is sent as it stands. `on_connected` is called once a connection stands.
        """
        attempt = _Attempt(on_connected)
        _attempt.set(attempt)
        data = None if not body else body.data if len(body) <= PIECE_BYTES else _Pieces(body)
        try:
            return await self._session.request(
                method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotAcceptedError("connect", f"cannot connect: {_describe(error)}") from error
        except aiohttp.SocketTimeoutError as error:
            raise AnswerError(
                504, "replica_timeout", f"the replica sent nothing for {self._idle_timeout_seconds:g} s"
            ) from error
        except (aiohttp.ClientConnectionError, OSError) as error:
            if attempt.evidence is not None and attempt.evidence.proves_nothing_was_taken(error):
                raise NotAcceptedError(
                    "connection_closed", "the replica had closed the connection"
                ) from error
            raise ReplicaDiedError(
                f"the replica closed the connection before it answered: {_describe(error)}"
            ) from error
        except aiohttp.ClientError as error:
            raise AnswerError(
                502, "replica_answer", f"the replica's answer is not HTTP: {_describe(error)}"
            ) from error
        finally:
            attempt.close()


class _Pieces(aiohttp.Payload):
    """A body that is not copied, and that is gone once it is dropped, whoever still knows this object."""

    def __init__(self, body: HeldBody) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """As aiohttp wants it; nobody calls it."""
        return self._body.data.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """All of it, also where an answer begins before and the body is dropped."""
        data = self._body.data
        try:
            for start in range(0, len(data), PIECE_BYTES):
                await writer.write(data[start : start + PIECE_BYTES])
        finally:
            del data  # the frame may outlive this in the traceback of an error

    @property
    def _body(self) -> HeldBody:
        body: HeldBody = self._value
        return body


async def can_connect(url: str) -> bool:
    """Whether somebody takes a connection there, which is closed at once."""
    parsed = URL(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_connection(parsed.host, parsed.port)
    except (OSError, ValueError):  # a timeout among them, and a host that is no name
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def read_refusal(response: aiohttp.ClientResponse) -> bytes | None:
    """The body of a replica's 503, to be passed on later; None where it does not come soon and short."""
    try:
        async with asyncio.timeout(REFUSAL_TIMEOUT_SECONDS):
            body = await response.content.read(LONGEST_REFUSAL_BYTES + 1)
            while body and len(body) <= LONGEST_REFUSAL_BYTES and not response.content.at_eof():
                body += await response.content.read(LONGEST_REFUSAL_BYTES + 1)
    except (aiohttp.ClientError, OSError):  # a time limit is an OSError
        return None
    return body if len(body) <= LONGEST_REFUSAL_BYTES else None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

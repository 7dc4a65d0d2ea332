"""Passes one replica's answer to one client: the head, then each piece as it comes and the client reads.

The head waits for the first piece: until then the request can still be sent to another replica.

Of the answer it knows whether it is an event stream, and whether the last piece ended an event: that decides
how the client learns that a stream has broken. It neither chooses replicas nor tries again.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from headway_gateway import headers, replies
from headway_gateway.error_codes import GatewayCode
from headway_gateway.errors import BrokenStreamError, ReplicaDiedError
from headway_gateway.http_server import set_comments

# Below this many bytes unsent, a write never has to wait for the client.
_UNSENT_BYTES_TO_WATCH = 32 * 1024
log = logging.getLogger(__name__)
_ENDS_OF_EVENT = (b"\n\n", b"\r\n\r\n", b"\r\r")


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading for too long."""


class Relay:
    """The way back to one client. `is_started` says whether its answer has begun."""

    def __init__(self, request: web.BaseRequest, request_id: str, idle_timeout_seconds: float) -> None:
        self._request = request
        self._request_id = request_id
        self._idle_timeout_seconds = idle_timeout_seconds
        self._response: web.StreamResponse | None = None
        self._is_at_event_end = True
        self._first = b""

    @property
    def is_started(self) -> bool:
        """Whether a response head has gone to the client."""
        return self._response is not None

    async def await_first(self, upstream: aiohttp.ClientResponse, *, least_bytes: int = 1) -> None:
        """Wait for the first piece of an answer's body, of which the client is told nothing yet.

        least_bytes: for so many of them, or all that there are.
        Raises ReplicaDiedError when the connection breaks, BrokenStreamError when nothing comes in time.
        """
        try:
            self._first = await upstream.content.readany()
            while len(self._first) < least_bytes and not upstream.content.at_eof():
                self._first += await upstream.content.readany()
        except aiohttp.SocketTimeoutError as error:
            raise _broken(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaDiedError(
                "the replica closed the connection before its answer's first byte"
            ) from error

    async def pass_on(self, upstream: aiohttp.ClientResponse, *, closes: bool) -> web.StreamResponse:
        """The whole answer, of which the first piece is here.

        Raises BrokenStreamError or ClientGoneError; a head may have been sent then.
        """
        passed = headers.to_client(upstream.headers, request_id=self._request_id)
        if garbled := headers.garbled_in(upstream.headers):
            log.warning(
                "left out of the replica's answer, as they are not UTF-8: %s",
                ", ".join(garbled),
                extra={"request_id": self._request_id},
            )
        first, self._first = self._first, b""
        if upstream.content.at_eof():
            # All of it is here already: one write instead of two.
            whole = web.Response(
                status=upstream.status, reason=upstream.reason, headers=passed, body=first or None
            )
            if closes:
                whole.force_close()
            return whole
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=passed)
        if closes:
            response.force_close()
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from error
        self._response = response
        set_comments(self._request, self._takes_comments)
        if first:
            await self._write(response, first)
        while piece := await self._read(upstream):
            await self._write(response, piece)
        await self._finish(response)
        return response

    def abandoned(self) -> web.StreamResponse:
        """What to hand the server when the client has gone; writing it fails, which ends the connection."""
        return self._response or web.Response(status=499, reason="Client Closed Request")

    async def break_off(self, message: str, *, code: GatewayCode) -> web.StreamResponse:
        """Tell the client that its stream has failed, as well as can be.

        A stream of events ends in order, and its connection stays: closed without an announcement, it could
        be lost under the client's next request. Of any other body the connection's end is the message.
        """
        response = self._response
        assert response is not None, "a stream that never began is answered, not broken off"
        try:
            if _is_events(response):
                separator = b"" if self._is_at_event_end else b"\n\n"
                await self._write(response, separator + replies.error_event(message, code=code))
                await self._finish(response)
            else:
                response.force_close()
                # Only a body that stays incomplete says "failed" here.
                if self._request.transport is not None:
                    self._request.transport.abort()
        except ClientGoneError:
            pass  # nobody is left to tell
        return response

    @staticmethod
    async def _read(upstream: aiohttp.ClientResponse) -> bytes:
        try:
            return await upstream.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(error) from error

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        self._is_at_event_end = piece.endswith(_ENDS_OF_EVENT)
        await self._to_client(response.write(piece), len(piece))

    def _takes_comments(self) -> bool:
        response, writer = self._response, self._request.writer
        is_chunked = isinstance(writer, StreamWriter) and writer.chunked
        return response is not None and _is_events(response) and is_chunked and self._is_at_event_end

    async def _finish(self, response: web.StreamResponse) -> None:
        set_comments(self._request, None)
        await self._to_client(response.write_eof(), 0)

    async def _to_client(self, writing: Coroutine[Any, Any, None], num_bytes: int) -> None:
        transport = self._request.transport
        unsent = 0 if transport is None else transport.get_write_buffer_size()
        try:
            if unsent + num_bytes < _UNSENT_BYTES_TO_WATCH:
                await writing
            else:
                async with asyncio.timeout(self._idle_timeout_seconds):
                    await writing
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ClientGoneError(f"the client read nothing for {self._idle_timeout_seconds:g} s") from None
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from error


def _is_events(response: web.StreamResponse) -> bool:
    return response.headers.get("Content-Type", "").startswith("text/event-stream")


def _broken(error: Exception) -> BrokenStreamError:
    # Ours alone: the kernel's own TimeoutError (ETIMEDOUT) says that the replica's node is gone.
    if isinstance(error, aiohttp.SocketTimeoutError):
        return BrokenStreamError("replica_timeout", "the replica stopped sending in the middle of its answer")
    return BrokenStreamError("replica_died", "the replica closed the connection in the middle of its answer")

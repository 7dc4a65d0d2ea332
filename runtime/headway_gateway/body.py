"""Reads a request's body whole, within a size and a time, so that it can be sent more than once.

The bytes are written where they stay, once: pieces that are joined at the end would need twice the room. A
body that is here before it is asked for, which no large one is, is taken as it is.
"""

import asyncio
import io
import re

from aiohttp import HttpVersion11, web

from headway_gateway import held_bodies
from headway_gateway.errors import BodyError
from headway_gateway.held_bodies import HeldBody

_NAME = b'"stream"'
# A name in JSON, and not within a text, where its quotation marks would be escaped.
_STREAM = re.compile(rb'(?<!\\)"stream"\s*:\s*true\b')


def asks_for_stream(body: bytes) -> bool:
    """Whether the answer is to come token by token, as far as a look at the JSON tells."""
    # A body may have megabytes, which the expression alone would take a fifth of a second for.
    at = body.find(_NAME)
    while at >= 0 and not _STREAM.match(body, at):
        at = body.find(_NAME, at + 1)
    return at >= 0


async def read_body(
    request: web.BaseRequest, *, max_bytes: int, timeout_seconds: float, held: HeldBody | None = None
) -> bytes | None:
    """The body, or None where the request has none. BodyError carries the status to answer with.

    held: makes room for it before it is read, as far as its length is told.
    """
    if not request.body_exists:
        return None
    if request.content_length is not None:
        if request.content_length > max_bytes:
            raise _too_large(max_bytes)
        if held is not None:
            held.make_room(request.content_length)
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer proper has not begun
    try:
        if request.content.is_eof():  # all of it is here, as small bodies are: nothing to wait for
            whole = request.content.read_nowait()
            _take(len(whole), max_bytes, held)
            return whole
        async with asyncio.timeout(timeout_seconds):
            return await _read(request, max_bytes, held)
    except TimeoutError:
        raise BodyError(
            408,
            f"the body did not arrive within {timeout_seconds:g} s; send it faster",
            code="request_timeout",
        ) from None
    except web.RequestPayloadError as error:
        raise BodyError(
            400, f"this is not valid HTTP ({error}); send HTTP/1.1", code="invalid_http"
        ) from None


async def _read(request: web.BaseRequest, max_bytes: int, held: HeldBody | None) -> bytes:
    num_bytes = 0

    def keep_room_for_what_is_here() -> None:
        if held is not None:
            held.keep_room(num_bytes)

    late = asyncio.get_running_loop().call_later(held_bodies.ANNOUNCED_SECONDS, keep_room_for_what_is_here)
    try:
        with io.BytesIO() as whole:  # of which nothing is left behind whatever ends this
            while piece := await request.content.readany():
                num_bytes += len(piece)
                _take(num_bytes, max_bytes, held)
                whole.write(piece)
            return whole.getvalue()
    finally:
        late.cancel()


def _take(num_bytes: int, max_bytes: int, held: HeldBody | None) -> None:
    """So much of it is here. Raises BodyError where that is too much."""
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    if held is not None:
        held.make_room(num_bytes)


def _too_large(max_bytes: int) -> BodyError:
    return BodyError(413, f"the body is larger than {max_bytes} bytes; send less", code="body_too_large")

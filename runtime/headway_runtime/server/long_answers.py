"""Answers of megabytes, made and sent so that no stream waits for them.

Making one is a thread's work; sending it in pieces lets the event loop go round between them, and a client
that reads slowly holds back no more than a piece.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

PIECE_BYTES = 256 * 2**10
# How long a client may leave a piece unread before it counts as gone.
SECONDS_PER_PIECE = 120.0

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class JsonBytes(Response):
    """JSON that has been written already."""

    media_type = "application/json"

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Returning from an unfinished response makes the server close the connection.
        with contextlib.suppress(TimeoutError):
            await send_in_pieces(bytes(self.body), send, SECONDS_PER_PIECE)


async def send_in_pieces(body: bytes, send: Send, seconds_per_piece: float) -> None:
    """The whole body of a response that has been started. TimeoutError if the client does not read on."""
    for start in range(0, len(body), PIECE_BYTES):
        end = start + PIECE_BYTES
        piece = {"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)}
        async with asyncio.timeout(seconds_per_piece):
            await send(piece)


def encode_list(values: Iterable[object]) -> msgspec.Raw:
    """A JSON list, made and encoded value by value: other threads get their turn in between."""
    return msgspec.Raw(b"[" + b",".join(map(msgspec.json.encode, values)) + b"]")

"""Answers of megabytes, made and sent so that no stream waits for them.

Making one is a thread's work; sending it in pieces lets the event loop go round between them, and a client
that reads slowly holds back no more than a piece.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

PIECE_BYTES = 256 * 2**10

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class JsonBytes(Response):
    """JSON that has been written already."""

    media_type = "application/json"

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_in_pieces(bytes(self.body), send)


async def send_in_pieces(body: bytes, send: Send) -> None:
    """The whole body of a response that has been started."""
    for start in range(0, len(body), PIECE_BYTES):
        end = start + PIECE_BYTES
        await send(
            {"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)},
        )


def encode_list(values: Iterable[object]) -> msgspec.Raw:
    """A JSON list, made and encoded value by value: other threads get their turn in between."""
    return msgspec.Raw(b"[" + b",".join(map(msgspec.json.encode, values)) + b"]")

"""A server that does nothing but keep time: every answer begins after one delay and goes on at one pace.

    python -m benchmarks.bench.server DELAY_MILLISECONDS PACE_MILLISECONDS

Prints its port. Timers are late, so each answer says how long its first event really took, from the moment
the request had been read to the moment the event was written: in microseconds, in the usage's
`cached_tokens`, a field that the client hands through and that nothing else here needs.
"""

import asyncio
import json
import sys
import time

import httptools
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = json.dumps({"object": "list", "data": [{"id": "clock", "object": "model"}]}).encode()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_EVENT = _chunk(
    b'data: {"id":"cmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"clock","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


class Exchange(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, delay_seconds: float, pace_seconds: float) -> None:
        self._delay_seconds, self._pace_seconds = delay_seconds, pace_seconds
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._url = b""
        self._transport: asyncio.WriteTransport | None = None
        self._read_at = self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, bytearray()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._read_at = time.perf_counter()
        if not self._url.endswith(b"/completions"):
            self._write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(_MODELS)}\r\n\r\n".encode() + _MODELS)
            return
        num_tokens = int(json.loads(self._body)["max_tokens"])
        asyncio.get_running_loop().call_later(self._delay_seconds, self._first, num_tokens)

    def _first(self, num_tokens: int) -> None:
        self._first_at = time.perf_counter()
        self._write(_HEAD + _EVENT)
        self._go_on(num_tokens, 1)

    def _go_on(self, num_tokens: int, num_written: int) -> None:
        if num_written == num_tokens:
            self._last(num_tokens)
            return
        asyncio.get_running_loop().call_later(self._pace_seconds, self._next, num_tokens, num_written)

    def _next(self, num_tokens: int, num_written: int) -> None:
        self._write(_EVENT)
        self._go_on(num_tokens, num_written + 1)

    def _last(self, num_tokens: int) -> None:
        took_microseconds = round(1e6 * (self._first_at - self._read_at))
        usage = {
            "prompt_tokens": 1,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": took_microseconds},
        }
        event = json.dumps({"choices": [], "usage": usage}).encode()
        self._write(_chunk(b"data: " + event + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def main(delay_milliseconds: float, pace_milliseconds: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Exchange(delay_milliseconds / 1000, pace_milliseconds / 1000), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), float(sys.argv[2])))

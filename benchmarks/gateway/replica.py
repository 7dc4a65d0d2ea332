"""A replica that costs almost nothing: answers a POST at once, or streams events at a pace. Knows no model.

    POST /v1/completions   one small JSON answer
    POST /v1/stream        `X-Events: N` events, `X-Pace-Milliseconds: P` apart (0: as fast as they go)

Each event carries the time it was written (CLOCK_MONOTONIC, which all processes of a machine share).
"""

import asyncio
import re
import sys
import time
from typing import cast

import uvloop

_BODY = b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"hello","finish_reason":"stop"}]}'
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_BODY),
    _BODY,
)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVENTS = re.compile(rb"x-events: *(\d+)", re.IGNORECASE)
_PACE = re.compile(rb"x-pace-milliseconds: *([\d.]+)", re.IGNORECASE)


class Replica(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its base class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        num_bytes = int(length[1]) if length else 0
        if not separator or len(rest) < num_bytes:
            return
        self._buffer = rest[num_bytes:]
        assert self._transport is not None
        if not head.startswith(b"POST /v1/stream"):
            self._transport.write(_ANSWER)
            return
        events, pace = _EVENTS.search(head), _PACE.search(head)
        assert events is not None
        assert pace is not None
        task = asyncio.create_task(_stream(self._transport, int(events[1]), float(pace[1]) / 1000))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()


async def _stream(transport: asyncio.Transport, num_events: int, pace_seconds: float) -> None:
    transport.write(_STREAM_HEAD)
    for number in range(num_events):
        await asyncio.sleep(pace_seconds)
        event = b'data: {"t":%d,"n":%d,"choices":[{"index":0,"text":" token","logprobs":null}]}\n\n' % (
            time.monotonic_ns(),
            number,
        )
        transport.write(b"%x\r\n%s\r\n" % (len(event), event))
    transport.write(b"0\r\n\r\n")


async def main() -> None:
    """Serve on a free port, printed as the first line, until killed."""
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))

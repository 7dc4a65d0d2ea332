"""Loads one server over keep-alive connections and measures it, at little cost of its own.

    python -m benchmarks.gateway.load PORT requests CONNECTIONS SECONDS
    python -m benchmarks.gateway.load PORT stream CONNECTIONS SECONDS EVENTS PACE_MILLISECONDS

Prints one JSON object: how many requests or events there were, how many a second, and percentiles in
milliseconds: of a request's time, or of the time from an event's writing to its reading.
"""

import asyncio
import json
import re
import sys
import time

import uvloop

_BODY = b'{"model":"m","prompt":"Twelve and thirty make","max_tokens":16,"stream":true}'
_WRITTEN_AT = re.compile(rb'data: \{"t":(\d+)')
# Where one chunk ends and another begins, which may be within an event.
_BETWEEN_CHUNKS = re.compile(rb"\r\n[1-9a-f][0-9a-f]*\r\n")


def _request(path: str, headers: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n{headers}"
    return f"{lines}Content-Length: {len(_BODY)}\r\n\r\n".encode() + _BODY


class Measured:
    """What all connections of one run saw: one time for each request or event."""

    def __init__(self) -> None:
        self.nanoseconds: list[int] = []

    def report(self, seconds: float) -> dict[str, float]:
        ordered = sorted(self.nanoseconds)
        percentiles = {
            f"p{percent}_milliseconds": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] / 1e6
            for percent in (50, 99)
        }
        return {"per_second": len(ordered) / seconds, "number": len(ordered), **percentiles}


async def _repeat_requests(port: int, until: float, measured: Measured) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request("/v1/completions")
    while time.monotonic() < until:
        started_at = time.monotonic_ns()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        assert length is not None, head
        await reader.readexactly(int(length[1]))
        measured.nanoseconds.append(time.monotonic_ns() - started_at)
    writer.close()


async def _repeat_streams(port: int, until: float, measured: Measured, events: int, pace: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request("/v1/stream", f"X-Events: {events}\r\nX-Pace-Milliseconds: {pace}\r\n")
    while time.monotonic() < until:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        tail, num_seen = b"", 0
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(65536)
            assert data, "the stream was cut"
            now = time.monotonic_ns()
            piece = _BETWEEN_CHUNKS.sub(b"", tail + data)
            found = _WRITTEN_AT.findall(piece)
            measured.nanoseconds.extend(now - int(written_at) for written_at in found)
            num_seen += len(found)
            # Keep what may be the beginning of an event; an event already counted loses its first letter.
            cut = piece.rfind(b"data: ")
            tail = piece[cut + 1 :] if cut >= 0 and _WRITTEN_AT.match(piece, cut) else piece[max(cut, 0) :]
        assert num_seen == events, f"{num_seen} of {events} events"
    writer.close()


async def main(arguments: list[str]) -> None:
    """Run one load and print what it saw."""
    port, kind, connections, seconds = int(arguments[0]), arguments[1], int(arguments[2]), float(arguments[3])
    measured = Measured()
    started_at = time.monotonic()
    until = started_at + seconds
    if kind == "requests":
        work = [_repeat_requests(port, until, measured) for _ in range(connections)]
    else:
        events, pace = int(arguments[4]), float(arguments[5])
        work = [_repeat_streams(port, until, measured, events, pace) for _ in range(connections)]
    await asyncio.gather(*work)
    print(json.dumps(measured.report(time.monotonic() - started_at)))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))

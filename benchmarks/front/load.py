"""Reads many streams at once and says when each token came: plain sockets, one thread, no event loop.

    python -m benchmarks.front.load PORT STREAMS SECONDS TOKENS MODEL_FOLDER TIMES_FILE

Each connection asks for streams of TOKENS tokens, one after the other, until the time is up. The text of a
chunk names the engine's step, whose time stands in TIMES_FILE (see `server.py`), so each token's delay is
known, and a token that is missing, doubled or out of order is found. What counts is the steady middle:
neither the first second, in which all streams begin at once, nor what comes after the time is up, when no
stream is begun again and fewer and fewer are left. Prints one JSON object.
"""

import json
import mmap
import re
import resource
import select
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.model_folder import NUM_STEP_TOKENS, step_texts
from benchmarks.front.server import MOST_STEPS

WARM_UP_SECONDS = 1.0
_TEXT = re.compile(rb'"text":"([^"]*)"')
_END = b"0\r\n\r\n"


def request_for(num_tokens: int) -> bytes:
    """A streamed completion of `num_tokens` tokens."""
    body = json.dumps(
        {"prompt": [300, 301, 302], "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": 1}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Reader:
    """One connection and where its stream stands."""

    __slots__ = ("end", "num_reads", "num_tokens", "socket", "step", "tail")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.begin()

    def begin(self) -> None:
        self.step = -1
        self.num_tokens = 0
        self.num_reads = 0
        self.tail = b""
        self.end = b""


@dataclass(frozen=True, slots=True)
class Window:
    """The steady middle of a run, in nanoseconds of the monotonic clock."""

    begins_at: int
    ends_at: int

    def __contains__(self, moment: int) -> bool:
        return self.begins_at <= moment < self.ends_at

    @property
    def seconds(self) -> float:
        return (self.ends_at - self.begins_at) / 1e9


def steady_middle(started_at: float, seconds: float) -> Window:
    """Of a run that began then and takes so long."""
    assert seconds > WARM_UP_SECONDS, seconds
    return Window(int((started_at + WARM_UP_SECONDS) * 1e9), int((started_at + seconds) * 1e9))


class Load:
    """All connections and what they saw.

    delays: of the tokens that were ready in the steady middle. num_delivered: tokens that arrived in it.
    """

    def __init__(self, folder: Path, times_file: Path, num_tokens: int) -> None:
        self._steps = step_texts(folder)
        self._num_tokens = num_tokens
        self._request = request_for(num_tokens)
        with times_file.open("rb") as file:
            self._times = memoryview(mmap.mmap(file.fileno(), MOST_STEPS * 8, access=mmap.ACCESS_READ)).cast(
                "q"
            )
        self.delays: list[int] = []
        self.arrivals: dict[int, tuple[int, int]] = {}
        self.num_reads = 0
        self.num_streams = 0
        self.num_delivered = 0

    def run(self, port: int, num_streams: int, seconds: float) -> Window:
        """Open the connections, read until the time is up and every stream has ended."""
        poll = select.epoll()
        readers: dict[int, Reader] = {}
        for _ in range(num_streams):
            reader = Reader(port)
            reader.socket.sendall(self._request)
            reader.socket.setblocking(False)
            readers[reader.socket.fileno()] = reader
            poll.register(reader.socket.fileno(), select.EPOLLIN)
        started_at = time.monotonic()
        window = steady_middle(started_at, seconds)
        stop_at = started_at + seconds
        while readers:
            found = poll.poll(30)
            assert found, "no stream moved for 30 s"
            for descriptor, _ in found:
                reader = readers[descriptor]
                data = reader.socket.recv(262144)
                assert data, f"a connection was closed after {reader.num_tokens} tokens: {reader.tail!r}"
                now = time.monotonic_ns()
                if not self._take(reader, data, now, window):
                    continue
                self.num_streams += 1
                if time.monotonic() < stop_at:
                    reader.begin()
                    reader.socket.sendall(self._request)
                else:
                    poll.unregister(descriptor)
                    reader.socket.close()
                    del readers[descriptor]
        return window

    def _take(self, reader: Reader, data: bytes, now: int, window: Window) -> bool:
        """Count the tokens in `data`; True when the stream has ended."""
        piece = reader.tail + data if reader.tail else data
        step = reader.step
        times = self._times
        if reader.num_reads == 0:
            assert data.startswith(b"HTTP/1.1 200 "), data
        reader.num_reads += 1
        found = _TEXT.findall(piece)
        for text in found:
            number = self._steps[text]
            if step < 0:
                step = self._first_step(number, now)
            else:
                step += 1
                assert step % NUM_STEP_TOKENS == number, f"step {step} brought {text!r}"
            ready_at = times[step % MOST_STEPS]
            if ready_at in window:
                self.delays.append(now - ready_at)
                seen = self.arrivals.get(step)
                self.arrivals[step] = (now, now) if seen is None else (seen[0], now)
        reader.step = step
        reader.num_tokens += len(found)
        self.num_delivered += len(found) if now in window else 0
        self.num_reads += 1
        reader.end = (reader.end + data)[-len(_END) :]
        if reader.end == _END:
            assert piece.find(b"data: [DONE]") >= 0, piece[-300:]
            assert reader.num_tokens == self._num_tokens, f"{reader.num_tokens} of {self._num_tokens} tokens"
            return True
        # A chunk is written as one piece, yet the network may cut it anywhere: keep what is not whole.
        cut = piece.rfind(b"data: ")
        if cut >= 0 and _TEXT.search(piece, cut) is not None:
            line_end = piece.rfind(b"\n", cut)
            reader.tail = piece[line_end + 1 :] if line_end >= 0 else b""
        else:
            reader.tail = piece[max(cut, 0) :]
        return False

    def _first_step(self, number: int, now: int) -> int:
        """The latest step with this token that was ready before `now`."""
        times = self._times
        best = -1
        for step in range(number, MOST_STEPS, NUM_STEP_TOKENS):
            if times[step] == 0:
                break
            if times[step] <= now:
                best = step
        assert best >= 0, "a token came before its step"
        return best


def percentile(ordered: list[int], share: float) -> float:
    """Milliseconds."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6 if ordered else 0.0


def main(arguments: list[str]) -> None:
    """Run one load and print what it saw."""
    port, num_streams, seconds, num_tokens = (
        int(arguments[0]),
        int(arguments[1]),
        float(arguments[2]),
        int(arguments[3]),
    )
    load = Load(Path(arguments[4]), Path(arguments[5]), num_tokens)
    started_at = time.monotonic()
    window = load.run(port, num_streams, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    delays = sorted(load.delays)
    spreads = sorted(last - first for first, last in load.arrivals.values())
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - started_at,
                "tokens": len(delays),
                "tokens_per_second": load.num_delivered / window.seconds,
                "streams": load.num_streams,
                "reads": load.num_reads,
                "p50_milliseconds": percentile(delays, 0.5),
                "p99_milliseconds": percentile(delays, 0.99),
                "worst_milliseconds": percentile(delays, 1.0),
                "spread_p50_milliseconds": percentile(spreads, 0.5),
                "spread_p99_milliseconds": percentile(spreads, 0.99),
                "processor_seconds": used.ru_utime + used.ru_stime,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])

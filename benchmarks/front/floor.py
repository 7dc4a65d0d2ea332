"""A stand-in for the server that only sends bytes it has made before: what load and machine cost alone.

    python -m benchmarks.front.floor MODEL_FOLDER TIMES_FILE PORT_FILE STREAMS TOKENS

Waits for STREAMS requests, then sends each of them one chunk per step, with the pace and the tokens of
`server.py`, one write per chunk, and ends all streams after TOKENS steps.
"""

import mmap
import os
import socket
import sys
import time
from pathlib import Path

from benchmarks.front.model_folder import step_token_ids
from benchmarks.front.server import MOST_STEPS, STEPS_VARIABLE
from tokenizers import Tokenizer

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    '"model":"/tmp/abcdefgh","choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":null,'
    '"stop_reason":null}]}\n\n'
)


def _chunk(event: str) -> bytes:
    return f"{len(event):x}\r\n{event}\r\n".encode()


def main(arguments: list[str]) -> int:
    """Serve the streams of one load after the other until killed."""
    folder, times_file, port_file = Path(arguments[0]), Path(arguments[1]), Path(arguments[2])
    num_streams, num_tokens = int(arguments[3]), int(arguments[4])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chunks = [_chunk(_EVENT % tokenizer.decode([token_id])) for token_id in step_token_ids(folder)]
    with times_file.open("r+b") as file:
        times = memoryview(mmap.mmap(file.fileno(), MOST_STEPS * 8)).cast("q")
    pace = float(os.environ[STEPS_VARIABLE])
    step_seconds = 1.0 / pace if pace else 0.0
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    port_file.write_text(str(listener.getsockname()[1]))
    connections = []
    for _ in range(num_streams):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(connection)
    step = 0
    while connections:
        for connection in connections:
            if not connection.recv(65536):
                return 0
            connection.sendall(_HEAD)
        next_at = time.monotonic()
        for _ in range(num_tokens):
            next_at = max(next_at + step_seconds, time.monotonic() - step_seconds)
            while (left := next_at - time.monotonic()) > 0:
                time.sleep(left)
            chunk = chunks[step % len(chunks)]
            times[step % MOST_STEPS] = time.monotonic_ns()
            for connection in connections:
                connection.sendall(chunk)
            step += 1
        for connection in connections:
            connection.sendall(_chunk("data: [DONE]\n\n") + b"0\r\n\r\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

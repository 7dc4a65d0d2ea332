"""Requests by bare sockets, as no client library would send them, and what comes back."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer

SHORT = {"model": "tiny", "prompt": [50], "max_tokens": 2}
LONG_BODY = json.dumps({**SHORT, "max_tokens": 10_000, "ignore_eos": True, "stream": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
ASK = POST % len(LONG_BODY) + b"\r\n" + LONG_BODY
PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine-1\r\n\r\n"
STEPS = {"HEADWAY_FAKE_STEP_SECONDS": "0.02"}


def answers(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def one_answer(connection: socket.socket) -> bytes:
    """One answer with a length, on a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def error_of(answer: bytes) -> tuple[int, Any]:
    """The status of a refusal and its error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    assert b"\r\nx-request-id: " in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


class Guests:
    """Connections to one server, closed at the end."""

    def __init__(self, server: RunningServer) -> None:
        self._port = server.port
        self.stack = ExitStack()

    def connect(self) -> socket.socket:
        return self.stack.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=15))

    def begin(self) -> socket.socket:
        """One whose answer takes longer than any test."""
        one = self.connect()
        one.sendall(ASK)
        assert one.recv(100).startswith(b"HTTP/1.1 200 ")
        return one

    def admitted(self) -> socket.socket:
        """One that has been answered, after as many tries as it takes."""
        deadline = time.monotonic() + 15
        while True:
            one = self.connect()
            one.sendall(PROBE)
            if one_answer(one).startswith(b"HTTP/1.1 200 "):
                return one
            assert time.monotonic() < deadline

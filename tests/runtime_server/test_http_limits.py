"""What a connection may send, how fast and how often: tried with bare sockets, as no client library would."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from tests.runtime_server.bare_sockets import SHORT, Guests, answers, error_of, one_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import RunningServer, StartServer


@pytest.fixture(scope="module")
def limited(start_shared_server: StartServer) -> RunningServer:
    """A server with tight limits."""
    return start_shared_server(
        "--max-header-bytes=4Ki",
        "--max-header-count=20",
        "--header-timeout-seconds=1",
        "--max-body-bytes=64Ki",
        "--body-timeout-seconds=1",
        "--timeout-keep-alive=1",
        environment={"HEADWAY_FAKE_STEP_SECONDS": "0.02"},
    )


@pytest.fixture
def connection(limited: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", limited.port), timeout=15) as connection:
        yield connection


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 5000), id="a long path"),
        pytest.param(b"GET /%b" % (b"a" * 5000), id="a path without end"),
        pytest.param(b"GET /health HTTP/1.1\r\nX: %b\r\n\r\n" % (b"a" * 5000), id="a long value"),
        pytest.param(b"GET /health HTTP/1.1\r\n%b: x\r\n\r\n" % (b"a" * 5000), id="a long name"),
        pytest.param(b"GET /health HTTP/1.1\r\nX: %b" % (b"a" * 5000), id="a value without end"),
        pytest.param(b"GET /health HTTP/1.1\r\n%b\r\n" % (b"X: y\r\n" * 21), id="many headers"),
        pytest.param(b"GET /health HTTP/1.1\r\n%b\r\n" % (b"X: y\r\n" * 5000), id="very many headers"),
    ],
)
def test_a_head_that_is_too_large_is_refused(connection: socket.socket, head: bytes) -> None:
    connection.sendall(head)
    status, error = error_of(answers(connection))
    assert status == 431
    assert "4096 bytes or 20 headers" in error["message"]


def test_a_head_within_the_limits_is_served(connection: socket.socket) -> None:
    headers = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 150) for number in range(18))
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n" % headers)
    assert answers(connection).startswith(b"HTTP/1.1 200 ")


def test_a_large_head_is_refused_on_a_connection_that_was_used_before(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert one_answer(connection).startswith(b"HTTP/1.1 200 ")
    connection.sendall(b"GET /health HTTP/1.1\r\nX: %b\r\n\r\n" % (b"a" * 5000))
    assert error_of(answers(connection))[0] == 431


def test_a_head_that_trickles_in_is_given_up(connection: socket.socket) -> None:
    """One byte at a time resets no clock."""
    started_at = time.monotonic()
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    while not select.select([connection], [], [], 0.1)[0]:
        assert time.monotonic() - started_at < 10
        connection.sendall(b"X")
    status, error = error_of(answers(connection))
    assert status == 408
    assert "within 1 s" in error["message"]
    assert time.monotonic() - started_at > 0.9


def test_a_connection_that_says_nothing_is_closed(connection: socket.socket) -> None:
    started_at = time.monotonic()
    assert answers(connection) == b""
    assert 0.9 < time.monotonic() - started_at < 10


def test_a_connection_is_closed_some_time_after_its_last_answer(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    started_at = time.monotonic()
    assert answers(connection).startswith(b"HTTP/1.1 200 ")
    assert 0.9 < time.monotonic() - started_at < 10


def test_an_answer_may_take_longer_than_any_of_these_times(
    limited: RunningServer, connection: socket.socket
) -> None:
    body = json.dumps({**SHORT, "max_tokens": 120, "stream": True}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    started_at = time.monotonic()
    answer = answers(connection)
    assert time.monotonic() - started_at > 2.0
    assert answer.count(b'"text"') == 120
    assert b"data: [DONE]" in answer


def test_a_body_that_trickles_in_is_given_up(connection: socket.socket) -> None:
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n\r\n{"
    )
    status, error = error_of(answers(connection))
    assert status == 408
    assert "within 1 s" in error["message"]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "in chunks"])
def test_a_body_that_is_too_large_is_refused(connection: socket.socket, *, is_chunked: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    if is_chunked:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(9):
            connection.sendall(b"2000\r\n%b\r\n" % (b" " * 8192))
    else:
        connection.sendall(head + b"Content-Length: 70000\r\n\r\n")
    status, error = error_of(answers(connection))
    assert status == 413
    assert "65536 bytes" in error["message"]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "in chunks"])
def test_a_client_that_sends_all_of_a_large_body_first_reads_why_it_is_refused(
    limited: RunningServer, *, is_chunked: bool
) -> None:
    body = b" " * (4 << 20)
    headers = {"Content-Type": "application/json"}
    content = iter([body[:100_000]] * 40) if is_chunked else body
    answer = httpx.post(f"{limited.url}/v1/completions", content=content, headers=headers, timeout=30)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"


def test_a_client_that_asks_before_it_sends_a_large_body_is_told_at_once(connection: socket.socket) -> None:
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: 4000000\r\n\r\n"
    )
    assert error_of(answers(connection))[0] == 413


@pytest.mark.parametrize(
    "bytes_sent",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"hello\r\n\r\n", id="no HTTP"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", id="no header"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", id="a negative length"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
            id="two lengths",
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            id="a bad chunk",
        ),
        pytest.param(b"GET http://[ HTTP/1.1\r\n\r\n", id="a bad address"),
    ],
)
def test_what_is_not_http_is_answered_with_400(connection: socket.socket, bytes_sent: bytes) -> None:
    connection.sendall(bytes_sent)
    status, error = error_of(answers(connection))
    assert status == 400
    assert error["type"] == "invalid_request_error"


def test_garbage_behind_a_request_does_not_spoil_its_answer(connection: socket.socket) -> None:
    body = json.dumps({**SHORT, "max_tokens": 20, "stream": True}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert connection.recv(1)
    connection.sendall(b"\x00\x01garbage\r\n\r\n")
    answer = answers(connection)
    assert answer.count(b'"text"') == 20
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_requests_sent_at_once_are_answered_in_turn(connection: socket.socket) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    connection.sendall(one * 20 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = answers(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 21
    assert answer.endswith(b'{"status":"ok"}')


def test_a_wish_for_another_protocol_is_not_granted_and_does_no_harm(connection: socket.socket) -> None:
    """As Java's client sends it with every first request."""
    body = json.dumps(SHORT).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = answers(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in answer


def test_every_refusal_carries_the_requests_id(connection: socket.socket, limited: RunningServer) -> None:
    headed = b"GET /health HTTP/1.1\r\nX-Request-Id: mine-1\r\n"
    connection.sendall(headed + b"X: y\r\n" * 21)
    answer = answers(connection)
    assert error_of(answer)[0] == 431
    assert b"x-request-id: mine-1\r\n" in answer
    guests = Guests(limited)
    with guests.stack:
        slow = guests.connect()
        slow.sendall(headed + b"X: y\r\n")
        answer = answers(slow)
        assert error_of(answer)[0] == 408
        assert b"x-request-id: mine-1\r\n" in answer
        # Not the id of the request before it, which has been answered.
        garbled = guests.connect()
        garbled.sendall(headed + b"\r\n")
        assert b"x-request-id: mine-1\r\n" in one_answer(garbled)
        garbled.sendall(b"garbage\r\n\r\n")
        answer = answers(garbled)
        assert error_of(answer)[0] == 400
        assert re.search(rb"x-request-id: [0-9a-f]{32}\r\n", answer)

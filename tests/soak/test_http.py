"""Requests drawn from our own OpenAPI document, and bytes drawn from nothing, against a live server.

No answer is a 5xx but the deliberate 503, every answer is one that the document names, and afterwards both
processes are the ones that were started.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import schemathesis
from benchmarks.soak import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

# The soak asks for more, which are others each time; without it they are the same in every run, as all draws
# are hypothesis', schemathesis' too. There is one such number for each operation, mode and kind of bytes.
EXAMPLES = max(5, int(os.environ.get("HEADWAY_FUZZ_EXAMPLES", "150")) // 10)
ANSWER_SECONDS = 60
QUIET = settings(
    max_examples=EXAMPLES,
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(scope="module")
def server() -> Iterator[run.Server]:
    with run.running_server(["--max-num-seqs=8"]) as started:
        run.wait_until_ready(started)
        yield started


def _engines(server: run.Server) -> list[psutil.Process]:
    """Grammars and large bodies have processes of their own, which come and go."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if any("engine_process" in word for word in child.cmdline())]


@pytest.fixture(autouse=True)
def _both_processes_live_on(server: run.Server) -> Iterator[None]:
    before = _engines(server)
    yield
    assert server.process.poll() is None, server.log
    assert len(before) == 1
    assert _engines(server) == before, server.log
    assert httpx.get(f"{server.url}/health", timeout=ANSWER_SECONDS).status_code == 200
    assert not (shown := run.tracebacks(server.log)), shown[:5000]


def operations(server: run.Server) -> list[Any]:
    """Every operation of the document, which itself must be valid."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]


def can_be_wrong(operation: Any) -> bool:
    """Whether a request of this operation can break the document: what only has a path cannot."""
    return "requestBody" in operation.definition.raw


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_what_the_document_allows_or_forbids_is_answered_as_it_says(
    server: run.Server, mode: GenerationMode
) -> None:
    found = operations(server)
    assert len(found) >= 6
    for operation in found:
        if mode is GenerationMode.NEGATIVE and not can_be_wrong(operation):
            continue

        @QUIET
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            body = case.body
            if isinstance(body, dict):
                # Long answers teach nothing here.
                body |= {name: 4 for name in ("max_tokens", "max_completion_tokens") if body.get(name)}
            response = case.call(timeout=ANSWER_SECONDS)
            what = f"{case.method} {case.path} {body!r}: {response.status_code} {response.text[:300]}"
            assert response.status_code < 500 or response.status_code == 503, what
            assert str(response.status_code) in case.operation.definition.raw["responses"], what
            if response.status_code >= 400:
                assert response.json()["error"]["message"], what

        check()


def test_bytes_that_are_no_request_harm_nobody(server: run.Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    start = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    pieces = st.sampled_from(
        [
            *(start, b"GET / HTTP/1.1\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"),
            *(b"Content-Length: -1\r\n", b"ffffffffffffffff\r\n", b"0\r\n\r\n", b"A: " + b"b" * 9000),
            *(b"\r\n", b"\0"),
        ]
    )

    @QUIET
    @given(st.lists(pieces | st.binary(max_size=40), min_size=1, max_size=8).map(b"".join))
    def check(sent: bytes) -> None:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
                assert not answer or answer.startswith(b"HTTP/1.1 "), answer
                assert not answer.startswith(b"HTTP/1.1 500"), (sent, answer)

    check()

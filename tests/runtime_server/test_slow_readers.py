"""Clients that read slowly or late: nothing is lost, nothing is written twice, and nobody else waits."""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING

import httpx2 as httpx

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

NUM_CHOICES = 128
NUM_TOKENS = 400
# Letters, so that an answer's text has one character per token.
PROMPT = list(range(35, 61))


def ask(server: RunningServer) -> socket.socket:
    """A connection that has asked for some twelve megabytes, and takes in little at a time."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "n": NUM_CHOICES,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


def test_a_client_that_reads_late_gets_every_token_once_and_in_order(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs=128")
    whole = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True},
        timeout=60,
    ).json()["choices"][0]["text"]
    with ask(server) as connection:
        # The engine is done long before the client reads anything but the head.
        finished = NUM_CHOICES + 1
        server.sample_until(lambda sample: sample["counters"]["finished"] == finished)
        # Meanwhile others are served.
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        received = bytearray()
        while data := connection.recv(1 << 20):
            received += data
    head, _, rest = bytes(received).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    body = bytearray()
    while rest:  # the chunks, taken apart by the book
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    events = re.findall(rb"data: (.*)\n\n", bytes(body))
    assert events.pop() == b"[DONE]"
    texts = [""] * NUM_CHOICES
    for event in events:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [whole] * NUM_CHOICES


def test_a_client_that_leaves_while_it_is_behind_is_forgotten(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs=128", environment={"HEADWAY_FAKE_STEP_SECONDS": "0.01"})
    with ask(server) as connection:
        assert connection.recv(1000)
    left = server.sample_until(lambda sample: sample["gauges"]["running"] == 0)
    assert left["counters"]["aborted"] + left["counters"]["finished"] == NUM_CHOICES
    assert left["counters"]["aborted"] > 0

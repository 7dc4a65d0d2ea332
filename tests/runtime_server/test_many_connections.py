"""More connections than a server has places for: who makes room, and what those too many are told."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from typing import TYPE_CHECKING

import openai
import pytest
from tests.runtime_server.bare_sockets import ASK, POST, PROBE, STEPS, Guests, answers, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import StartServer


@pytest.fixture(scope="module")
def full(start_shared_server: StartServer) -> Iterator[Guests]:
    """A server for four connections, which are all busy."""
    guests = Guests(start_shared_server("--max-connections=4", environment=STEPS))
    with guests.stack:
        for _ in range(4):
            guests.begin()
        yield guests


def test_a_connection_that_has_rested_makes_room_and_is_free_again_when_it_ends(
    start_server: StartServer,
) -> None:
    server = start_server("--max-connections=4", environment=STEPS)
    guests = Guests(server)
    with guests.stack:
        for _ in range(3):
            guests.begin()
        idle = guests.admitted()
        # Its next request may be on its way: it keeps its place for a while.
        other = guests.connect()
        other.sendall(PROBE)
        assert error_of(answers(other))[0] == 503
        assert select.select([idle], [], [], 0)[0] == []
        fifth = guests.admitted()
        assert idle.recv(1) == b""
        fifth.sendall(ASK)
        assert fifth.recv(100).startswith(b"HTTP/1.1 200 ")
    again = Guests(server)
    with again.stack:
        again.admitted()


def test_a_connection_too_many_is_told_when_it_has_asked_and_not_before(full: Guests) -> None:
    one = full.connect()
    assert select.select([one], [], [], 0.3)[0] == []
    one.sendall(PROBE)
    answer = answers(one)
    status, error = error_of(answer)
    assert (status, error["code"]) == (503, "connections")
    assert b"x-request-id: mine-1\r\n" in answer
    assert b"retry-after: 1\r\n" in answer.lower()


def test_a_connection_too_many_that_never_asks_is_told_as_well(full: Guests) -> None:
    started_at = time.monotonic()
    assert error_of(answers(full.connect()))[0] == 503
    assert 0.9 < time.monotonic() - started_at < 10


def test_a_client_that_sends_its_body_late_still_reads_that_there_is_no_place(full: Guests) -> None:
    """What it sends after the answer must not be met with a reset, which would take the answer away."""
    one = full.connect()
    assert select.select([one], [], [], 0.3)[0] == []
    one.sendall(POST % 4_000_000 + b"\r\n")
    assert select.select([one], [], [], 5)[0] == [one]  # the answer is there, unread
    for _ in range(40):
        one.sendall(b" " * 100_000)
    one.shutdown(socket.SHUT_WR)
    assert error_of(answers(one))[0] == 503


def test_a_head_that_comes_in_parts_reads_that_there_is_no_place(full: Guests) -> None:
    one = full.connect()
    for part in (PROBE[:20], PROBE[20:-2]):
        one.sendall(part)
        assert select.select([one], [], [], 0.2)[0] == []
    one.sendall(PROBE[-2:])
    assert error_of(answers(one))[0] == 503


@pytest.mark.parametrize("num_busy", [0, 2], ids=["on an idle server", "on a busy one"])
async def test_a_burst_of_clients_is_answered_to_the_last_one(
    start_server: StartServer, num_busy: int
) -> None:
    server = start_server("--max-connections=4", environment=STEPS)
    guests = Guests(server)

    async def ask() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            try:
                await client.completions.create(
                    model="tiny", prompt=[50] * 20, max_tokens=10, extra_headers={"X-Request-Id": "mine-1"}
                )
            except openai.InternalServerError as error:
                return f"{error.status_code} {error.code} {error.request_id}"
            return "200"

    with guests.stack:
        for _ in range(num_busy):
            guests.begin()
        said = await asyncio.gather(*(ask() for _ in range(60)))
    assert set(said) == {"200", "503 connections mine-1"}
    assert said.count("200") >= 4 - num_busy

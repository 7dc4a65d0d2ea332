"""How quickly the event loop accepts a crowd."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from headway_runtime.server.listening import doors, listen

CROWD = 64


@pytest.mark.parametrize(("num_doors", "most_rounds"), [(1, None), (16, 12)])
def test_a_crowd_is_accepted_in_a_few_rounds_of_the_loop(num_doors: int, most_rounds: int | None) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds = runner.run(rounds_until_accepted(num_doors))
    # The first case shows what the copies are for: should it fail, the loop does without them.
    assert rounds >= CROWD if most_rounds is None else rounds <= most_rounds


async def rounds_until_accepted(num_doors: int) -> int:
    """Rounds of the loop from the first connection that it accepts to the last; all are waiting before."""
    loop = asyncio.get_running_loop()
    (listener,) = listen("127.0.0.1", 0)
    number = 0
    accepted_at: list[int] = []
    all_accepted = asyncio.Event()

    def turn() -> None:
        nonlocal number
        number += 1
        loop.call_soon(turn)

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted_at.append(number)
            transport.close()
            if len(accepted_at) == CROWD:
                all_accepted.set()

    servers = [await loop.create_server(Protocol, sock=one) for one in doors(listener, num_doors)]
    clients = [socket.create_connection(listener.getsockname()) for _ in range(CROWD)]
    turn()
    async with asyncio.timeout(20):
        await all_accepted.wait()
    for server in servers:
        server.close()
    for client in clients:
        client.close()
    return accepted_at[-1] - accepted_at[0] + 1


def test_all_doors_open_on_one_port() -> None:
    (listener,) = listen("127.0.0.1", 0)
    opened = doors(listener, 3)
    address = listener.getsockname()
    assert opened[0] is listener
    assert len({one.getsockname() for one in opened}) == 1
    assert len({one.fileno() for one in opened}) == 3
    for one in opened:
        one.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)

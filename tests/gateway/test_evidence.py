"""What the kernel can and cannot prove about a connection that closed without an answer; on real sockets."""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from headway_gateway.evidence import Evidence
from headway_gateway.upstream import Upstream, WitnessConnector

if TYPE_CHECKING:
    from tests.gateway.conftest import StartGateway, StartReplica

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        sys.platform != "linux", reason="only Linux tells how much the other side acknowledged"
    ),
]


class UsedConnection:
    """A connection over which one exchange has gone already."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.gateway = socket.create_connection(listener.getsockname())
            self.replica, _ = listener.accept()
        self.gateway.sendall(b"first request")
        self.replica.recv(100)
        self.replica.sendall(b"first answer")
        self.gateway.recv(100)
        self.evidence = Evidence(self.gateway.fileno(), self.gateway.family)

    def end_at_the_gateway(self) -> BaseException:
        """Read until the connection ends, as the event loop does; how it ended, in aiohttp's words."""
        try:
            assert self.gateway.recv(100) == b""
        except OSError as error:
            return aiohttp.ClientOSError(error.errno, error.strerror)
        else:
            return aiohttp.ServerDisconnectedError()
        finally:
            self.gateway.close()


def test_a_request_sent_to_a_connection_already_closed_was_taken_by_nobody() -> None:
    connection = UsedConnection()
    connection.replica.close()
    connection.gateway.sendall(b"second request")
    assert connection.evidence.proves_nothing_was_taken(connection.end_at_the_gateway())
    connection.evidence.close()


def test_a_request_that_was_read_before_the_connection_closed_may_have_been_taken() -> None:
    connection = UsedConnection()
    connection.gateway.sendall(b"second request")
    connection.replica.recv(100)
    connection.replica.close()
    assert not connection.evidence.proves_nothing_was_taken(connection.end_at_the_gateway())
    connection.evidence.close()


def test_a_reset_proves_nothing_even_if_the_request_was_not_read() -> None:
    connection = UsedConnection()
    connection.gateway.sendall(b"second request")
    connection.replica.close()  # with unread bytes: the kernel resets
    error = connection.end_at_the_gateway()
    assert isinstance(error, ConnectionResetError | aiohttp.ClientOSError)
    assert not connection.evidence.proves_nothing_was_taken(error)
    connection.evidence.close()


def test_where_the_kernel_does_not_tell_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway_gateway.evidence.sys.platform", "elsewhere")
    connection = UsedConnection()
    connection.replica.close()
    connection.gateway.sendall(b"second request")
    assert not connection.evidence.proves_nothing_was_taken(connection.end_at_the_gateway())
    connection.evidence.close()


class LosingConnector(WitnessConnector):
    """Loses a race on purpose: once armed, `close` closes a kept-alive connection before it is written to."""

    close_first: Callable[[], Awaitable[None]] | None = None

    async def connect(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the signature is aiohttp's
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        close, self.close_first = self.close_first, None
        if close is not None:
            await close()
        return connection


@pytest.mark.parametrize("is_seen", [False, True], ids=["before it notices", "as it notices"])
async def test_a_request_that_meets_a_connection_being_closed_is_sent_again_on_another(
    *, is_seen: bool, start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    connector = LosingConnector(limit=0)
    gateway = await start_gateway(replica, upstream=Upstream(5.0, connector))

    async def close() -> None:
        if is_seen:
            await replica.hang_up()
        else:
            replica.shut_down_connections()

    for number in range(3):
        connector.close_first = close if number == 1 else None
        async with client.post(f"{gateway.url}/v1/completions", data=str(number)) as response:
            assert response.status == 200
    # Each was taken exactly once.
    assert [request.body for request in replica.requests] == [b"0", b"1", b"2"]
    assert replica.num_connections == 2
    assert dict(gateway.application.counters.retried) == {"connection_closed": 1}
    assert gateway.counters["finished"] == 3

"""IPv6: where the gateway listens, replicas whose addresses stand in brackets, and what clients' are told."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from headway_gateway.backend import BackendEntry
from headway_gateway.errors import ConfigError
from headway_gateway.lifecycle import listen
from headway_gateway.upstream import can_connect

if TYPE_CHECKING:
    from tests.gateway.conftest import Replica, StartCommand, StartGateway, StartReplica, Table

pytestmark = pytest.mark.timeout(60)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


async def on_ipv6(replica: Replica) -> BackendEntry:
    """The replica, at the same port of the other loopback address."""
    await replica.stop()
    server = await asyncio.start_server(replica.accept, "::1", replica.port)
    replica._server = server
    return BackendEntry(replica.name, f"http://[::1]:{replica.port}", "ready")


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]"])
async def test_the_unspecified_host_is_every_address_of_both_kinds(
    host: str,
    start_replica: StartReplica,
    start_command: StartCommand,
    client: aiohttp.ClientSession,
    table: Table,
) -> None:
    replica = await start_replica("a")
    entry = await on_ipv6(replica)
    table.write(entry)
    gateway = await start_command("--backends-file", str(table.path), "--host", host)
    port = gateway.url.rpartition(":")[2]
    for address, peer in (("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")):
        async with client.post(f"http://{address}:{port}/v1/completions", json={}) as response:
            assert response.status == 200
        seen = replica.requests[-1].headers
        assert seen["host"] == f"[::1]:{replica.port}"
        assert seen["x-forwarded-for"] == peer
        assert seen["x-forwarded-host"] == f"{address}:{port}"
    assert any(f"listening on 0.0.0.0 and :: port {port}" in line["message"] for line in gateway.log)


@needs_ipv6
async def test_a_replica_at_an_ipv6_address_is_tried_and_named_like_any_other(
    start_replica: StartReplica, start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    replica = await start_replica("a")
    gateway = await start_gateway()
    entry = await on_ipv6(replica)
    assert await can_connect(entry.url)
    server, replica._server = replica._server, None
    assert server is not None
    server.close()
    await server.wait_closed()
    assert not await can_connect(entry.url)
    gateway.application.pool.update([entry])
    request = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    await gateway.until(lambda: any(one.is_suspect for one in gateway.application.pool.backends))
    await on_ipv6(replica)
    async with await request as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param(socket.AF_INET, id="no-ipv4", marks=needs_ipv6),
        pytest.param(socket.AF_INET6, id="no-ipv6"),
    ],
)
def test_where_one_kind_is_missing_the_other_is_enough(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.create_server

    def create(address: Any, *, family: int, **options: Any) -> socket.socket:
        if family == missing:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", create)
    (only,) = listen("::", 0)
    assert only.family == (socket.AF_INET if missing == socket.AF_INET6 else socket.AF_INET6)
    only.close()


@needs_ipv6
def test_a_port_that_one_kind_has_not_free_is_not_taken_by_half() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host='::' --port={port}: .*in use"):
            listen("::", port)
        with socket.create_server(("0.0.0.0", port)):
            pass


def test_a_host_that_is_told_is_the_only_one() -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        (only,) = listen(host, 0)
        assert only.getsockname()[0] == host
        only.close()

"""The local table of replicas: what is understood, what is refused, and that edits are followed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from headway_gateway.backend import BackendEntry
from headway_gateway.backends_file import BackendsFile, parse_table
from headway_gateway.errors import BackendListError

if TYPE_CHECKING:
    from tests.gateway.conftest import StartCommand, StartReplica, Table

pytestmark = pytest.mark.timeout(120)
GOOD_ROW = {"id": "a", "url": "http://127.0.0.1:1", "state": "ready"}


def table_of(*rows: Any, **changes: Any) -> bytes:
    return json.dumps({"version": 1, "backends": list(rows), **changes}).encode()


def test_a_table_is_read_in_its_order() -> None:
    rows = (GOOD_ROW, {"id": "b", "url": "http://[::1]:2/", "state": "draining"})
    assert parse_table(table_of(*rows)).entries == [
        BackendEntry("a", "http://127.0.0.1:1", "ready"),
        BackendEntry("b", "http://[::1]:2", "draining"),
    ]
    assert parse_table(table_of()).entries == []
    assert parse_table(table_of(waiting_for="demo-0: fetching hf://a/b")).waiting_for == (
        "demo-0: fetching hf://a/b"
    )


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b"", "not JSON"),
        (b'{"version": 1, "backends": [', "not JSON"),
        (b"[]", "version"),
        (table_of(GOOD_ROW, version=2), "version=2"),
        (table_of(backends={}), "not a list"),
        (table_of("a"), r"backends\[0\]='a'"),
        (table_of(GOOD_ROW, {**GOOD_ROW, "id": ""}), r"backends\[1\].id=''"),
        (table_of({**GOOD_ROW, "state": "gone"}), "state='gone'"),
        (table_of({**GOOD_ROW, "url": "127.0.0.1:1"}), "url='127.0.0.1:1'"),
        (table_of({**GOOD_ROW, "url": "http://a:1/path"}), "not the root"),
        (table_of({**GOOD_ROW, "url": "http://a:99999"}), "url='http://a:99999'"),
        (table_of({**GOOD_ROW, "url": 8}), "url=8"),
        (table_of(GOOD_ROW, GOOD_ROW), "twice"),
        (table_of(GOOD_ROW, waiting_for=8), "waiting_for=8"),
    ],
)
def test_a_malformed_table_is_refused_with_the_place_that_is_wrong(content: bytes, want: str) -> None:
    with pytest.raises(BackendListError, match=want):
        parse_table(content)


def test_only_a_changed_table_is_read_and_a_bad_one_reported_once(table: Table) -> None:
    lists: list[list[str]] = []
    errors: list[None] = []
    file = BackendsFile(
        table.path, lambda entries, _: lists.append([x.id for x in entries]), lambda: errors.append(None)
    )
    file.look()
    file.look()
    assert (lists, len(errors)) == ([], 1)  # it is not there yet
    table.write(BackendEntry("a", "http://a:1", "ready"))
    file.look()
    file.look()
    assert lists == [["a"]]
    table.write_raw("{")
    file.look()
    file.look()
    assert (lists, len(errors)) == ([["a"]], 2)
    table.path.unlink()
    file.look()
    table.write(BackendEntry("b", "http://b:1", "ready"))
    file.look()
    assert (lists, len(errors)) == ([["a"], ["b"]], 3)


async def test_a_running_gateway_follows_every_edit(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    a, b = await start_replica("a"), await start_replica("b")
    gateway = await start_command("--backends-file", str(table.path), "--max-waiting", "0")

    async def answers() -> set[str]:
        names = set()
        for _ in range(4):
            async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
                names.add((await response.json()).get("replica", "nobody"))
        return names

    async def until(*want: str) -> None:
        async with asyncio.timeout(20):
            while await answers() != set(want):  # noqa: ASYNC110 - each look is a request
                await asyncio.sleep(0.01)

    async with client.get(f"{gateway.url}/ready") as response:
        assert response.status == 503
    assert await answers() == {"nobody"}
    table.write(a.entry())
    await until("a")
    async with client.get(f"{gateway.url}/ready") as response:
        assert response.status == 200
    table.write(a.entry(), b.entry())
    await until("a", "b")
    table.write(a.entry("draining"), b.entry())
    await until("b")
    table.write_raw('{"version": 1, "backends": "none"}')
    await gateway.until_logged("kept the last good list of backends: the table's backends='none'")
    assert await answers() == {"b"}
    table.write(a.entry())
    await until("a")

"""What becomes of a gateway whose list of backends cannot be followed, for a reason that nobody foresaw."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from headway_gateway import backend_lists
from headway_gateway.backend import BackendEntry
from headway_gateway.backend_lists import keep_following
from headway_gateway.backends_file import BackendsFile
from headway_gateway.errors import BackendListError, ConfigError

if TYPE_CHECKING:
    from tests.gateway.conftest import StartCommand, StartGateway, StartReplica, Table

pytestmark = pytest.mark.timeout(60)
# JSON that Python reads only up to a depth: RecursionError, which is no ValueError.
TOO_DEEP = "[" * 100_000


async def test_after_the_first_list_an_unforeseen_error_is_counted_and_the_list_followed_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_lists, "FIRST_PAUSE_SECONDS", 0.001)
    num_errors, num_begun = 0, 0
    is_followed = asyncio.Event()

    def count() -> None:
        nonlocal num_errors
        num_errors += 1

    async def follow() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= 3:
            raise KeyError("addresses")
        is_followed.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(keep_following(follow, has_list=lambda: True, on_error=count))
        await asyncio.wait_for(is_followed.wait(), 20)
    assert (num_begun, num_errors) == (4, 3)
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3
    assert "kept the last list of backends" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (KeyError("addresses"), BackendListError),
        (ConfigError("--kubernetes-service: no way to the API server"), ConfigError),
    ],
    ids=["unforeseen", "of-a-flag"],
)
async def test_before_the_first_list_an_error_ends_it(error: Exception, want: type[Exception]) -> None:
    async def follow() -> None:
        raise error

    with pytest.raises(want, match=str(error)):
        await keep_following(follow, has_list=lambda: False, on_error=lambda: None)


async def test_a_table_that_cannot_even_be_tried_leaves_the_gateway_with_the_last_one(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    replica, other = await start_replica("a"), await start_replica("b")
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path))

    async def ask() -> str:
        async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
            return str((await response.json())["replica"])

    assert await ask() == "a"
    table.write_raw(TOO_DEEP)
    await gateway.until_logged("kept the last list of backends")
    assert await ask() == "a"
    table.write(other.entry())
    async with asyncio.timeout(20):
        while await ask() != "b":
            pass


def test_a_gateway_without_a_first_list_ends_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text(TOO_DEEP)
    command = [sys.executable, "-m", "headway", "gateway", "--port", "0", "--backends-file", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "headway gateway: no list of backends can be had: RecursionError"
    )


async def test_the_age_of_the_list_is_since_it_was_last_known_to_be_current(
    start_gateway: StartGateway, client: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway()

    async def age() -> float:
        async with client.get(f"{gateway.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(
            next(line for line in lines if line.startswith("headway_gateway_backend_list_age_")).split()[1]
        )

    gateway.application.counters.backend_list_seen_at = time.monotonic() - 1000.0
    assert await age() >= 1000.0
    gateway.application.note_backend_list_seen()
    assert await age() < 1000.0


def test_a_table_is_current_for_as_long_as_it_stands_there(table: Table) -> None:
    num_seen = 0

    def count() -> None:
        nonlocal num_seen
        num_seen += 1

    file = BackendsFile(table.path, lambda *_: None, lambda: None, count)
    file.look()
    assert num_seen == 0
    table.write(BackendEntry("a", "http://a:1", "ready"))
    file.look()
    file.look()
    assert num_seen == 2
    table.write_raw("{")
    file.look()
    file.look()
    assert num_seen == 2

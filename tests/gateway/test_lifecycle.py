"""The real command: its flags, its start, how it drains, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from headway_gateway.config import ServiceReference, parse_config

if TYPE_CHECKING:
    from tests.gateway.conftest import Command, Replica, StartCommand, StartReplica, Table

pytestmark = pytest.mark.timeout(120)


async def until_ready(client: aiohttp.ClientSession, gateway: Command) -> None:
    async with asyncio.timeout(20):
        while True:
            async with client.get(f"{gateway.url}/ready") as response:
                if response.status == 200:
                    return


async def test_draining_serves_what_is_there_and_what_still_comes(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    replica = await start_replica("a")
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path))
    await until_ready(client, gateway)
    replica.streams_by_hand()
    running = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send("data: 1\n\n")
    async with await running as response:
        assert await response.content.readany() == b"data: 1\n\n"
        gateway.terminate()
        await gateway.until_logged("draining")

        async with client.get(f"{gateway.url}/ready") as ready:
            assert ready.status == 503
            assert ready.headers["Connection"] == "close"
            assert await ready.json() == {"status": "draining"}
        late = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
        late_stream = await replica.next_stream()
        await late_stream.head()
        await late_stream.end()
        async with await late as late_response:
            assert late_response.status == 200
            assert late_response.headers["Connection"] == "close"

        assert gateway.process.returncode is None
        await stream.send("data: 2\n\n")
        await stream.end()
        assert await response.content.read() == b"data: 2\n\n"
    assert await gateway.exit_status() == 0
    assert any(line["message"] == "drained" for line in gateway.log)


async def test_a_gateway_that_never_had_a_request_ends_at_once(
    start_command: StartCommand, table: Table
) -> None:
    table.write()
    gateway = await start_command("--backends-file", str(table.path))
    started_at = asyncio.get_running_loop().time()
    gateway.terminate()
    assert await gateway.exit_status() == 0
    assert asyncio.get_running_loop().time() - started_at < 0.9


async def test_after_the_drain_timeout_each_client_is_told(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path), "--drain-timeout-seconds", "0.3")
    await until_ready(client, gateway)
    streaming = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send('data: {"n": 1}\n\n')
    silent = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    silent_stream = await replica.next_stream()
    async with await streaming as response:
        gateway.terminate()
        assert b'"code": "shutting_down"' in await response.content.read()
    async with await silent as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert (await response.json())["error"]["code"] == "shutting_down"
    for one in (stream, silent_stream):
        await asyncio.wait_for(one.is_client_gone.wait(), 10)
    assert await gateway.exit_status() == 0


async def test_a_second_signal_ends_all_at_once(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    replica = await start_replica("a")
    replica.streams_by_hand()
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path), "--drain-timeout-seconds", "600")
    await until_ready(client, gateway)
    running = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    stream = await replica.next_stream()
    await stream.head()
    await stream.send('data: {"n": 1}\n\n')
    async with await running:
        gateway.terminate()
        await gateway.until_logged("draining")
        gateway.process.send_signal(signal.SIGINT)
        assert await gateway.exit_status() == 0
    await asyncio.wait_for(stream.is_client_gone.wait(), 10)


async def test_a_gateway_whose_parent_dies_ends(start_command: StartCommand, table: Table) -> None:
    table.write()
    reading, writing = os.pipe()
    gateway = await start_command(
        *("--backends-file", str(table.path), "--lifeline-fd", str(reading)), pass_fds=(reading,)
    )
    os.close(reading)
    assert gateway.process.returncode is None
    os.close(writing)  # what the system does for a parent that was killed
    assert await gateway.exit_status() == 1


async def test_failed_attempts_are_logged_as_json_with_the_request_id(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    gone, alive = await start_replica("gone"), await start_replica("alive")
    table.write(gone.entry(), alive.entry())
    gateway = await start_command("--backends-file", str(table.path))
    await until_ready(client, gateway)
    await gone.stop()
    for _ in range(2):
        headers = {"X-Request-Id": "find-me"}
        async with client.post(f"{gateway.url}/v1/completions", json={}, headers=headers) as response:
            assert response.status == 200
    (line,) = [line for line in gateway.log if line.get("request_id") == "find-me"]
    assert line["level"] == "warning"
    assert line["backend"] == "gone"
    assert line["path"] == "/v1/completions"
    assert "connect" in line["message"]


async def test_many_connections_at_once_are_held(
    start_replica: StartReplica, start_command: StartCommand, client: aiohttp.ClientSession, table: Table
) -> None:
    """More than aiohttp's default limits on either side, all at the replica at the same time."""
    replica: Replica = await start_replica("a")
    replica.streams_by_hand()
    table.write(replica.entry())
    gateway = await start_command("--backends-file", str(table.path))
    await until_ready(client, gateway)
    number = 300
    requests = [
        asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={})) for _ in range(number)
    ]
    streams = [await replica.next_stream() for _ in range(number)]
    for stream in streams:
        await stream.head()
        await stream.end()
    for request in requests:
        async with await request as response:
            assert await response.read() == b""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway", "gateway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ([], "--backends-file --kubernetes-service is required"),
        (["--backends-file", "a", "--kubernetes-service", "b/c"], "not allowed with"),
        (["--kubernetes-service", "nameless"], "'nameless' is not NAMESPACE/NAME"),
        (["--backends-file", "a", "--port", "99999"], "'99999' is out of range; give from 0 to 65535"),
        (["--backends-file", "a", "--max-waiting", "-1"], "'-1' is out of range; give at least 0"),
        (["--backends-file", "a", "--idle-timeout-seconds", "0"], "give a number above 0"),
        (["--backends-file", "a", "--max-body-bytes", "0"], "give at least 1"),
        (
            ["--backends-file", "a", "--waiting-timeout-seconds", "inf"],
            "'inf' is out of range; give 0 or more",
        ),
        (["--backends-file", "a", "--admin-audience", "a/b"], "belong together"),
        (["--backends-file", "a", "--back", "b"], "unknown flag --back (did you mean --backends-file?)"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(
    arguments: list[str], want: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(arguments)
    assert caught.value.code == 2
    assert want in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_flags_become_the_config() -> None:
    config = parse_config(["--kubernetes-service", "default/demo-replicas", "--waiting-timeout-seconds", "2"])
    assert config.kubernetes_service == ServiceReference("default", "demo-replicas")
    assert (config.backends_file, config.waiting_timeout_seconds, config.max_waiting) == (None, 2.0, 1024)


def test_a_start_that_cannot_succeed_says_why(tmp_path: Path) -> None:
    backends = ("--backends-file", str(tmp_path / "table"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run(*backends, "--port", port)
    assert (result.returncode, f"--port={port}" in result.stderr) == (2, True)
    result = run(*backends, "--admin-public-key-file", str(tmp_path / "no.pem"), "--admin-audience", "a/b")
    assert (result.returncode, "no.pem" in result.stderr) == (2, True)
    result = run(*backends, "--lifeline-fd", "987")
    assert (result.returncode, "--lifeline-fd=987" in result.stderr) == (2, True)
    assert "Traceback" not in result.stderr

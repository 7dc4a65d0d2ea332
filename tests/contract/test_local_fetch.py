"""What a replica says of its fetch reaches who runs `headway up`, and who waits at the gateway."""

import asyncio
import io
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from rich.console import Console

from headway_operator.cluster.local_fetch import fetch_words
from headway_operator.commands.up_view import condition, fetching, table
from headway_operator.local_service import LocalService, running_service
from headway_runtime.load_progress import LOG_INTERVAL_SECONDS, LoadProgress
from headway_runtime.process_log import configure_logging
from headway_runtime.sources.fetching import _words


def test_progress_is_read_as_the_runtime_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    now = [0.0]
    try:
        configure_logging("info")
        progress = LoadProgress(
            8_000_000_000, 3, words=_words("hf://acme/model"), has_terminal=False, clock=lambda: now[0]
        )
        now[0] = LOG_INTERVAL_SECONDS
        progress.tensor_read(2_000_000_000)
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    log = "headway serve: noise\n" + capsys.readouterr().err + "a line of somebody else's\n"
    assert fetch_words(log) == ("fetching hf://acme/model: 2.00 of 8.00 GB, 0 of 3 files", False)
    assert fetch_words("a line of somebody else's\n") == ("", False)


async def test_a_hub_that_cannot_be_reached_is_named_by_the_table_the_status_and_the_gateway(
    tmp_path: Path, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "service.yaml"
    spec: dict[str, Any] = {
        "model": {"source": "hf://acme/model"},
        "device": "cpu",
        "slo": {"ttftMilliseconds": 1000},
        "waiting": {"timeoutSeconds": 1},
    }
    body = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": spec,
    }
    file.write_text(yaml.safe_dump(body))
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", hub)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        async with running_service(file, port=0, interval_seconds=0.2) as service:
            want = f"hf://acme/model@main: {hub} cannot be reached"
            await eventually(lambda: any(want in one for one in told(service)), 60)
            shown = console_of(service)
            assert f"{hub} cannot be reached" in shown
            message = await eventually(lambda: model_message(service, want), 10)
            assert message.startswith("demo-")
            async with aiohttp.ClientSession() as session:
                error = await asyncio.wait_for(refusal(session, service), 60)
            assert error["code"] == "waiting_timeout"
            assert want in error["message"]
    assert service.cluster.has_failed
    assert want in "".join(path.read_text() for path in service.cluster.workspace.logs.iterdir())


def told(service: LocalService) -> list[str]:
    return [fetching(one.snapshot()) for one in service.cluster.processes if one.revision]


def model_message(service: LocalService, want: str) -> str:
    found = condition(service.status, "ModelAvailable")
    return str(found["message"]) if found.get("reason") == "Fetching" and want in found["message"] else ""


def console_of(service: LocalService) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(table(service))
    return console.export_text()


async def refusal(session: aiohttp.ClientSession, service: LocalService) -> dict[str, Any]:
    """The gateway's own 503; it may have to start first."""
    while True:
        try:
            async with session.get(f"{service.url}/v1/models") as response:
                assert response.status == 503
                return dict((await response.json())["error"])
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.05)

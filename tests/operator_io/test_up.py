"""`headway up` as a user runs it: real processes, the real gateway, stand-ins for the replicas."""

import asyncio
import io
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml
from rich.console import Console

from headway_operator.cluster.local_workspace import Workspace
from headway_operator.commands.up import main
from headway_operator.commands.up_view import line, table
from headway_operator.errors import SpecError
from headway_operator.local_service import read_manifest_file, running_service
from headway_operator.yaml_file import read_documents

STANDIN = Path(__file__).with_name("standin_server.py")


def manifest(environment: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "runtime",
        "command": [sys.executable, str(STANDIN)],
        "env": [{"name": name, "value": value} for name, value in (environment or {}).items()],
    }
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "slo": {"ttftMilliseconds": 300},
            "drainTimeoutSeconds": 5,
            "template": {"spec": {"containers": [container]}},
            **spec,
        },
    }


@dataclass
class Up:
    """A running `headway up`, its manifest file and what it leaves."""

    process: asyncio.subprocess.Process
    file: Path
    url: str
    folder: Path

    def write(self, body: dict[str, Any]) -> None:
        self.file.write_text(yaml.safe_dump(body))

    def status(self) -> dict[str, Any]:
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def written_at(self) -> int:
        return (self.folder / "status.json").stat().st_mtime_ns

    def ready_reason(self) -> str:
        conditions = self.status().get("conditions") or [{"type": "Ready", "reason": ""}]
        return str(next(c["reason"] for c in conditions if c["type"] == "Ready"))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def is_ready(self) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/ready") as response:
                return response.status == 200 and self.ready_reason() == "Serving"
        except aiohttp.ClientError:
            return False

    async def ended(self) -> str:
        output, _ = await asyncio.wait_for(self.process.communicate(), 60)
        return output.decode()


@pytest.fixture
async def up(tmp_path: Path, free_port: int) -> AsyncIterator[Callable[..., Awaitable[Up]]]:
    """Start `headway up` on a manifest; its own temporary folder shows what it leaves behind."""
    started: list[Up] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    async def start(body: dict[str, Any]) -> Up:
        file = tmp_path / "service.yaml"
        file.write_text(yaml.safe_dump(body))
        options = ("--port", str(free_port), "--interval-seconds", "0.3")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headway", "up", "-f", str(file), *options),
            *("--status-file", str(tmp_path / "status.json")),
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        started.append(Up(process, file, f"http://127.0.0.1:{free_port}", tmp_path))
        return started[-1]

    yield start
    for one in started:
        if one.process.returncode is None:
            one.process.kill()
            await one.process.wait()


@pytest.fixture
def hangups_count() -> Iterator[None]:
    """Under nohup they are ignored, by children too, as it is meant."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_count")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_it_serves_until_a_signal_and_leaves_nothing(up: Any, eventually: Any, number: int) -> None:
    limits = {"limits": {"cpu": "1", "memory": "1Gi"}}
    running = await up(manifest(resources=limits))
    await eventually(running.is_ready, 60)
    children = running.children()
    assert len(children) >= 2
    running.process.send_signal(number)
    output = await running.ended()
    assert running.process.returncode == 0
    told = (
        "set in the manifest, without effect on this machine: resources.limits.memory (a process is not held"
    )
    assert output.count(told) == 1
    assert "logs are kept" not in output
    assert "Ready, replicas 1/1" in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(children, timeout=0)
    assert alive == []
    assert list((running.folder / "tmp").iterdir()) == []


async def test_killed_it_takes_every_process_along(up: Any, eventually: Any) -> None:
    running = await up(manifest())
    await eventually(running.is_ready, 60)
    children = running.children()
    running.process.kill()
    await running.process.wait()
    await eventually(
        lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    )


async def test_a_second_signal_stops_at_once(up: Any, eventually: Any) -> None:
    running = await up(manifest({"STANDIN_IGNORE_TERM": "1"}, drainTimeoutSeconds=600))
    await eventually(running.is_ready, 60)
    children = running.children()
    running.process.send_signal(signal.SIGINT)
    await eventually(lambda: len(running.children()) < len(children))  # the gateway has gone
    running.process.send_signal(signal.SIGINT)
    output = await running.ended()
    assert running.process.returncode == 0
    assert "once more Ctrl-C stops at once" in output
    _, alive = psutil.wait_procs(children, timeout=0)
    assert alive == []


async def test_a_saved_edit_is_taken_over_and_a_broken_one_is_told(up: Any, eventually: Any) -> None:
    running = await up(manifest())
    await eventually(running.is_ready, 60)
    revision = running.status()["revision"]["name"]
    running.write(manifest(scaling={"minReplicas": 2}))
    await eventually(lambda: running.status()["readyReplicas"] == 2, 60)
    assert running.status()["observedGeneration"] == 2
    assert running.status()["revision"]["name"] == revision
    not_usable = (
        "kind: [",
        json.dumps(manifest(scaling={"minReplicas": 2}, tensorParallelSize=65)),
        json.dumps(manifest(scaling={"minReplicass": 2})),
    )
    for text in not_usable:
        running.file.write_text(text)
        for _ in range(3):  # passes go on, by the last manifest that could be honoured
            before = running.written_at()
            await eventually(lambda before=before: running.written_at() != before)
        assert running.status()["readyReplicas"] == 2
        assert running.ready_reason() == "Serving"
    running.write(manifest(slo={"ttftMilliseconds": 450}, scaling={"minReplicas": 2}))
    await eventually(lambda: running.status().get("slo", {}).get("ttftMilliseconds", {}).get("target") == 450)
    assert running.status()["revision"]["name"] == revision
    running.file.write_text("kind: [")
    for _ in range(3):
        before = running.written_at()
        await eventually(lambda before=before: running.written_at() != before)
    running.write(manifest(slo={"ttftMilliseconds": 450}, scaling={"minReplicas": 2}))
    for _ in range(3):
        before = running.written_at()
        await eventually(lambda before=before: running.written_at() != before)
    running.process.send_signal(signal.SIGTERM)
    output = await running.ended()
    assert [line.partition(" ")[2] for line in output.splitlines() if "manifest taken over" in line] == [
        "manifest taken over: scaling.minReplicas unset -> 2",
        "manifest taken over: slo.ttftMilliseconds 300 -> 450",
        "manifest taken over: no field differs from what was in force",
    ]
    assert output.count("manifest not taken over, the last good one stays in force: ") == 4
    assert "is not YAML" in output
    assert "spec.tensorParallelSize" in output
    assert "spec.scaling.minReplicass" in output


async def test_an_edit_whose_replicas_fail_is_told_with_who_still_serves(up: Any, eventually: Any) -> None:
    running = await up(manifest())
    await eventually(running.is_ready, 60)
    failing = manifest({"STANDIN_FAIL": "RuntimeError: no such weights"})
    running.write(failing)
    await eventually(lambda: "no such weights" in json.dumps(running.status()))
    assert running.status()["readyReplicas"] == 1
    running.write(manifest())
    await eventually(running.is_ready)
    running.process.send_signal(signal.SIGTERM)
    output = await running.ended()
    edit = "manifest taken over: template.spec.containers changed; new replicas replace the old ones, which"
    assert output.count(edit) == 1
    back = (
        "manifest taken over: template.spec.containers changed; replicas that were started with these fields"
    )
    assert output.count(back) == 1
    assert output.count("the replicas of the manifest before still serve") == 1


async def test_a_failing_replica_is_shown_with_its_last_lines(up: Any, eventually: Any) -> None:
    running = await up(manifest({"STANDIN_FAIL": "RuntimeError: no such weights"}))
    await eventually(lambda: running.ready_reason() == "CrashLoopBackOff")
    running.process.send_signal(signal.SIGTERM)
    output = await running.ended()
    assert running.process.returncode == 0
    assert "CrashLoopBackOff: exited with status 1; last line: RuntimeError: no such weights" in output
    assert "the last lines of" in output
    (kept,) = (running.folder / "tmp").iterdir()
    assert [path.name for path in kept.iterdir()] == ["logs"]
    assert f"the logs are kept: {kept}/logs" in output
    replicas = [path for path in (kept / "logs").iterdir() if "gateway" not in path.name]
    assert [path.read_text().count("RuntimeError: no such weights") > 0 for path in replicas] == [True]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    Workspace(kept.parent).remove()  # another start, which sweeps what was abandoned
    assert list(kept.parent.iterdir()) == [kept]


async def test_lines_of_a_fetch_are_said_once_where_only_numbers_change(
    up: Any, eventually: Any, tmp_path: Path
) -> None:
    words = "2026-01-01T00:00:00.000Z INFO headway_runtime.load_progress fetching hf://acme/m: %s of 9.00 GB"
    warning = "2026-01-01T00:00:00.000Z WARNING headway_runtime.sources.fetching hf://acme/m: no answer"
    log = tmp_path / "replica.log"
    with log.open("w") as file:
        running = await up(manifest({"STANDIN_LOG_FILE": str(log)}))
        for line, shown in (
            (words % "1.00", "1.00 of 9.00 GB"),
            (words % "2.00", "2.00 of 9.00 GB"),
            (warning, "no answer"),
        ):
            print(line, file=file, flush=True)
            await eventually(lambda shown=shown: shown in waiting_for(running))
            for _ in range(3):
                before = running.written_at()
                await eventually(lambda before=before: running.written_at() != before)
    running.process.send_signal(signal.SIGTERM)
    output = await running.ended()
    told = [line.partition(": ")[2] for line in output.splitlines() if "hf://acme/m" in line]
    assert told == ["fetching hf://acme/m: 1.00 of 9.00 GB", "hf://acme/m: no answer"]


def waiting_for(running: Up) -> str:
    tables = (running.folder / "tmp").glob("headway-up-*/backends.json")
    return "".join(json.loads(path.read_text())["waiting_for"] for path in tables)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("kind: [", 'service.yaml", line 1, column 8', id="no-yaml"),
        pytest.param(
            "kind: InferenceService\nspec:\n  device: cpu\n  replicas: 1\n  device: cuda\n",
            "the key 'device' stands twice in one place, on line 3 and on line 5; keep one of them",
            id="a-key-twice",
        ),
        pytest.param("kind: Pod", "holds a document of kind 'Pod'; want one InferenceService", id="a-pod"),
        pytest.param(
            yaml.safe_dump_all([{"kind": "ConfigMap"}, manifest()]),
            "holds a ConfigMap without metadata.name",
            id="no-name",
        ),
        pytest.param("", "holds 0 documents of kind InferenceService", id="empty"),
        pytest.param(
            yaml.safe_dump(manifest(slo={"ttftMilliseconds": 0})),
            "spec.slo.ttftMilliseconds",
            id="out-of-range",
        ),
        pytest.param(
            yaml.safe_dump_all([{"kind": "ModelCache"}, manifest()]),
            "holds a ModelCache, which a cluster needs; this machine keeps what it has fetched",
            id="a-cache",
        ),
        pytest.param(
            yaml.safe_dump(manifest(model={"source": "cache://llama"})),
            "names cache://llama, which a cluster needs; this machine keeps what it has fetched",
            id="from-a-cache",
        ),
        pytest.param(yaml.safe_dump(manifest(modle={})), "spec.modle: unknown field", id="misspelt"),
        pytest.param(
            yaml.safe_dump(manifest(tensorParallelSize=65)), "spec.tensorParallelSize", id="too-many"
        ),
    ],
)
def test_a_manifest_that_cannot_be_honoured_is_refused_at_once(
    text: str, want: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    assert main(["-f", str(file), "--port", "0", "--no-table"]) == 1
    assert want in capsys.readouterr().err


def test_a_missing_file_and_a_taken_port_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-f", str(tmp_path / "none.yaml"), "--port", "0"]) == 1
    assert "none.yaml: cannot be read: No such file or directory" in capsys.readouterr().err
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["-f", str(file), "--port", str(port)]) == 1
        err = capsys.readouterr().err
        assert main(["-f", str(tmp_path / "none.yaml"), "--port", str(port)]) == 1
        assert "none.yaml: cannot be read" in capsys.readouterr().err
    assert f"port {port} is not free: Address already in use; choose another with --port" in err
    with pytest.raises(SystemExit) as usage:
        main(["-f", str(file), "--port", "99999"])
    assert usage.value.code == 2


def test_secrets_and_config_maps_stand_beside_the_service(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    secret = {"kind": "Secret", "metadata": {"name": "api"}, "data": {"api-keys": "c2VzYW1l"}}
    config_map = {"kind": "ConfigMap", "metadata": {"name": "judge"}, "data": {"a.txt": "12 + 34"}}
    file.write_text(yaml.safe_dump_all([secret, manifest(), config_map]))
    assert read_manifest_file(file).secrets == {"api": {"api-keys": b"sesame"}}
    assert read_manifest_file(file).config_maps == {"judge": {"a.txt": "12 + 34"}}
    file.write_text(yaml.safe_dump_all([manifest(), manifest()]))
    with pytest.raises(SpecError, match="holds 2 documents"):
        read_manifest_file(file)


def test_a_key_may_stand_in_each_mapping_and_write_over_what_is_merged(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("a: &base {b: 1, c: 2}\nd: {<<: *base, b: 3}\n---\na: 4\n---\n")
    assert read_documents(file) == [{"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}, {"a": 4}]
    file.write_text('[{"a": 1, 2: 3},\n {"b": 4,\n  "b": 4}]')
    with pytest.raises(SpecError, match=r"service\.yaml: the key 'b' .* on line 2 and on line 3"):
        read_documents(file)


async def test_the_programmatic_service_shows_itself(
    tmp_path: Path, free_port: int, eventually: Any, children: Any
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest()))
    changes: list[None] = []
    async with running_service(
        file, port=0, interval_seconds=0.2, on_change=lambda: changes.append(None)
    ) as service:
        await eventually(lambda: line(service).startswith("Ready, replicas 1/1"), 60)
        console = Console(width=160, record=True, file=io.StringIO())
        console.print(table(service))
        shown = console.export_text()
        assert "default/demo" in shown
        assert service.url in shown
        (replica,) = [p for p in service.cluster.processes if p.revision]
        assert [replica.name, "ready", str(replica.port), "0", "0", "0"] in [
            row.split() for row in shown.splitlines()
        ]
    assert changes
    assert children() == []

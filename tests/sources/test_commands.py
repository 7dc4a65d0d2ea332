"""From the command line and from Python: `headway fetch`, `headway serve` and `Engine` with remote models."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway_runtime.errors import ModelFetchError
from headway_runtime.sources import fetching
from headway_runtime.sources.fetch_task import Task

ARGUMENTS = ("--device=cpu", "--max-model-len=128", "--max-num-seqs=2", "--port=0")


@pytest.fixture
def start(hub: Any) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command in the background; its end is the test's."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *arguments],
            env={**os.environ, "HF_ENDPOINT": hub.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def until(fact: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := fact()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_fetch_prints_the_folder_and_nothing_else(
    hub: Any, headway: Any, make_files: Any, holds: Any
) -> None:
    files = make_files()
    hub.add("org/name", files)
    done = headway("fetch", "hf://org/name")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.rstrip("\n"))
    holds(folder, files)
    assert "of hf://org/name in 8 files in" in done.stderr
    assert "\r" not in done.stderr
    # A commit that is there is found without a network, and without the Hub's library.
    num_asked = len(hub.asked)
    again = headway("fetch", "hf://org/name", "--revision", hub.revisions["main"])
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert len(hub.asked) == num_asked
    offline = headway("fetch", "hf://org/name", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout, offline.stderr) == (0, done.stdout, "")
    assert len(hub.asked) == num_asked


def test_a_model_that_was_copied_into_the_cache_is_left_as_it_is(
    hub: Any, headway: Any, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    """As real files, where others have links."""
    hub.add("org/name", tiny)
    commit = hub.revisions["main"]
    repository = tmp_path / "hub" / "models--org--name"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    for name, content in tiny.items():
        (folder / name).write_bytes(content)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "1"}, {}):
        done = headway("fetch", "hf://org/name", HF_HOME=str(tmp_path), **environment)
        assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == tiny
    assert hub.storage.asked == []


def test_folders_and_bundled_models_are_printed_as_they_are(headway: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for source in (str(tmp_path), f"file://{tmp_path}"):
        assert headway("fetch", source).stdout == f"{tmp_path}\n"
    assert headway("fetch", "bundled://headway-tiny").stdout.endswith("bundled/headway-tiny\n")


def test_what_is_wrong_takes_one_line_and_a_status(hub: Any, headway: Any, tmp_path: Path) -> None:
    for arguments, status, want in (
        (["fetch", "hf://org/none"], 3, "headway fetch: hf://org/none@main: there is no such repository"),
        (["fetch", "hf://none"], 2, "headway fetch: model source 'hf://none': want hf://ORG/NAME"),
        (["fetch"], 2, "headway fetch: the following arguments are required: MODEL"),
        (["serve", "hf://org/none"], 3, "headway serve: hf://org/none@main: there is no such repository"),
        (
            ["serve", "pvc://claim/x"],
            2,
            "headway serve: model source 'pvc://claim/x': a PersistentVolumeClaim",
        ),
    ):
        done = headway(*arguments)
        assert done.returncode == status, arguments
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith(want)


def test_a_folder_that_cannot_be_written_is_named(hub: Any, headway: Any, tiny: Any, tmp_path: Path) -> None:
    hub.add("org/name", tiny)
    (tmp_path / "file").write_text("")
    done = headway("fetch", "hf://org/name", "--download-dir", str(tmp_path / "file"))
    assert done.returncode == 3
    assert f"{tmp_path}/file/models--org--name: cannot be written (Not a directory)" in done.stderr
    assert "choose another folder with --download-dir" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_told_with_its_remedy(
    hub: Any, headway: Any, make_files: Any, holds: Any, tmp_path: Path
) -> None:
    """By a limit on the size of files, which is as good as a full disk to who writes."""
    files = make_files(num_shards=1, shard_bytes=4_000_000)
    hub.add("org/name", files)
    told = f"--result-file {tmp_path}/result"
    command = f"{sys.executable} -m headway fetch hf://org/name {told}"
    limited = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 2000; exec {command}"],
        env={**os.environ, "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert limited.returncode == 3
    assert json.loads((tmp_path / "result").read_text())["error"] == "NoRoomError"
    assert "cannot be written (File too large); free some of it, or choose another folder" in limited.stderr
    done = headway("fetch", "hf://org/name")
    assert done.returncode == 0, done.stderr
    holds(Path(done.stdout.strip()), files)


def test_who_supervises_a_fetch_is_told_how_it_goes(
    hub: Any, headway: Any, make_files: Any, tmp_path: Path
) -> None:
    files = make_files()
    hub.add("org/name", files)
    result, folder = tmp_path / "result", tmp_path / "claim"
    arguments = ("--download-dir", str(folder), "--result-file", str(result), "--progress-seconds", "1e-9")

    def fetched() -> list[dict[str, int]]:
        done = headway("fetch", "hf://org/name", *arguments)
        assert done.returncode == 0, done.stderr
        told = json.loads(result.read_text())
        assert (told["folder"], told["identity"]) == (done.stdout.strip(), hub.revisions["main"])
        assert told["bytes"] == sum(path.stat().st_size for path in Path(told["folder"]).iterdir())
        lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        assert lines[-1] == {"bytes": told["bytes"], "total_bytes": told["bytes"]}
        return lines

    assert fetched()[0]["bytes"] < 10**6
    # One file is lost: what is there counts as there.
    (lost, *_) = [path for path in folder.glob("*/blobs/*") if path.stat().st_size > 10**6]
    lost.unlink()
    assert min(one["total_bytes"] for one in fetched()[-2:]) > 8 * 10**6

    hub.private.add("org/secret")
    refused = headway("fetch", "hf://org/secret", *arguments, HF_TOKEN="hf_wrong")
    assert refused.returncode == 3
    told = json.loads(result.read_text())
    assert told["error"] == "SourceRefusedError"
    assert "the token of HF_TOKEN does not open it" in told["message"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--progress-seconds", "0"], "'0' is out of range; give a number above 0"),
        (["--result-file", "/no/such/folder/result"], "its folder is not there"),
        (["--adapter", "--revision", "v1"], "write the adapter as hf://ORG/NAME@REVISION"),
    ],
)
def test_flags_that_cannot_be_used_are_named(headway: Any, flags: list[str], complaint: str) -> None:
    done = headway("fetch", "hf://org/name", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr


def test_two_at_once_fetch_once(hub: Any, start: Any, make_files: Any, fault: Any) -> None:
    files = make_files(num_shards=1)
    hub.add("org/name", files)
    # The first is held in the middle of the weights until the second is seen to wait.
    (path,) = hub.storage.blobs.keys() & {
        one for one in hub.storage.blobs if len(hub.storage.blobs[one]) > 10**6
    }
    hub.storage.faults[path] = [fault(after=2_000_000, stall=True)]
    first = start("fetch", "hf://org/name")
    until(lambda: hub.storage.asked)
    second = start("fetch", "hf://org/name")
    assert "hf://org/name@main: waiting for process" in second.stderr.readline()
    hub.storage.released.set()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert sum("range" not in one.headers for one in hub.storage.asked) == 1


@pytest.mark.parametrize("command", ["fetch", "serve"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_fetch_at_once_and_the_next_goes_on(
    hub: Any, start: Any, headway: Any, make_files: Any, fault: Any, command: str, number: signal.Signals
) -> None:
    files = make_files(num_shards=1)
    hub.add("org/name", files)
    path = next(name for name, content in hub.storage.blobs.items() if len(content) > 10**6)
    hub.storage.faults[path] = [fault(after=2_000_000, stall=True)]
    process = start(command, "hf://org/name")
    until(lambda: partial_bytes() == 2_000_000)
    (child,) = psutil.Process(process.pid).children()
    began_at = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - began_at < 5
    assert process.returncode == 128 + number
    assert said.endswith(
        f"{number.name} while the model was fetched; what has come is kept: start again to go on\n"
    )
    assert "Traceback" not in said
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert headway("fetch", "hf://org/name").returncode == 0
    assert [one.headers.get("range") for one in hub.storage.asked] == [None, "bytes=2000000-"]


def partial_bytes() -> int:
    found = list(Path(os.environ["HOME"]).rglob("*.headway-partial"))
    return sum(path.stat().st_size for path in found if path.exists())


def test_a_fetch_ends_with_who_asked_for_it(hub: Any, start: Any, make_files: Any, fault: Any) -> None:
    hub.add("org/name", make_files(num_shards=1))
    path = next(name for name, content in hub.storage.blobs.items() if len(content) > 10**6)
    hub.storage.faults[path] = [fault(after=2_000_000, stall=True)] * 2
    process = start("fetch", "hf://org/name")
    until(lambda: hub.storage.asked)
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    until(lambda: not child.is_running(), seconds=10)
    # A server whose own parent is gone, as the pipe tells, ends while it fetches, too.
    read_end, write_end = os.pipe()
    server = start("serve", "hf://org/name", "--lifeline-fd", str(read_end), pass_fds=(read_end,))
    os.close(read_end)
    until(lambda: len(hub.storage.asked) == 2)
    os.close(write_end)
    server.communicate(timeout=10)
    assert server.returncode != 0


def test_a_terminal_sees_a_bar(hub: Any, make_files: Any) -> None:
    hub.add("org/name", make_files())
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", "fetch", "hf://org/name"],
            env={**os.environ, "HF_ENDPOINT": hub.url},
            stdout=subprocess.DEVNULL,
            stderr=theirs,
        )
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            seen += part
        assert process.wait(timeout=60) == 0
    finally:
        os.close(ours)
    assert b"Fetching:   0%" in seen
    assert b"100%" in seen


def test_a_served_model_is_fetched_once_for_all_processes(
    hub: Any, start: Any, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("org/name", tiny)
    port_file = tmp_path / "port"
    process = start(
        "serve", "hf://org/name@main", *ARGUMENTS, f"--port-file={port_file}", "--api-server-count=2"
    )
    until(lambda: port_file.exists() or process.poll() is not None)
    url = f"http://127.0.0.1:{port_file.read_text().strip()}"
    until(lambda: status_of(f"{url}/ready") == 200)
    body = {"model": "hf://org/name@main", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4
    assert sum(one.path.endswith("revision/main") for one in hub.asked) == 1
    assert len(hub.storage.asked) == 1
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "fetched 0.0" in said


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except OSError:
        return 0


def test_the_engine_in_python_takes_remote_models(hub: Any, tiny: dict[str, bytes], tmp_path: Path) -> None:
    hub.add("org/name", tiny)
    program = (
        "from headway_runtime import Engine, SamplingParams\n"
        f"options = dict(revision='main', download_dir={str(tmp_path)!r}, device='cpu')\n"
        "with Engine('hf://org/name', **options) as engine:\n"
        "    params = SamplingParams(temperature=0, max_tokens=4)\n"
        "    print(len(engine.generate('Once', params, use_tqdm=False)[0].outputs[0].token_ids))\n"
        "import sys; print(sorted({'huggingface_hub.hf_api', 'botocore'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "4\n[]\n", done.stderr
    assert (tmp_path / "models--org--name" / "refs" / "main").exists()


FETCHES = "import os, sys; import headway_runtime.sources.fetch_process as process; "


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (
            "process.run = lambda *_: {}['no such field']; os._exit(process.main(sys.argv[1:]))",
            r"hf://org/name: .* met KeyError \('no such field'\), which is a defect of Headway: report it",
        ),
        ("os._exit(7)", "'hf://org/name': the process .* ended with status 7 and did not say why; look at"),
        (
            "os.kill(os.getpid(), 9)",
            "'hf://org/name': the process .* was ended by signal 9 .*memory runs out",
        ),
    ],
    ids=["defect", "silent end", "killed"],
)
def test_how_the_process_that_fetches_ended_is_told(
    program: str, want: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetching, "COMMAND", (sys.executable, "-c", FETCHES + program))
    with pytest.raises(ModelFetchError, match=want):
        fetching.fetch_apart(Task("hf://org/name"))
    assert ("Traceback" in caplog.text) == ("defect" in want)


def test_who_serves_imports_no_library_of_a_source() -> None:
    program = (
        "import sys\n"
        "from headway_runtime.server import serve\n"
        "serve.resolve_options(serve.build_parser().parse_args(['bundled://headway-tiny']), {})\n"
        "names = {'huggingface_hub', 'httpx2', 'botocore', 'zstandard', 'urllib3'}\n"
        "print(sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_who_fetches_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "import headway_runtime.sources.fetch_process\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr

"""Runs of the command against servers that fail, are not there, or are left before they have answered."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.bench.conftest import Behaviour, RunBench, SmallServer

SHORT = ("--input-length=8", "--output-length=4")


@pytest.mark.parametrize(
    ("fault", "want"),
    [
        ("status 500", "http_500"),
        ("drop first", "disconnected"),
        ("drop after 2", "disconnected"),
        ("error after 2", "stream_error"),
        ("no done", "truncated"),
        ("hang", "timeout"),
    ],
)
def test_each_fault_is_counted_as_what_it_is(
    small_server: "SmallServer", run_bench: "RunBench", fault: str, want: str
) -> None:
    small_server.sometimes((2, 5), fault=fault)
    flags = ("--concurrency", "2", "--num-requests", "10", *SHORT, "--request-timeout-seconds", "1.5")
    done = run_bench(*flags)
    assert done.status == 0
    assert {kind: f["count"] for kind, f in done.summary["failures"].items()} == {want: 2}
    assert (done.summary["num_completed"], done.summary["num_failed"]) == (8, 2)
    assert f"failed     2 x {want}" in done.output


def test_failures_fail_the_command_only_when_asked(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    flags = ("--num-requests", "4", *SHORT, "--fail-on-error")
    assert run_bench(*flags).status == 0
    small_server.bodies.clear()
    small_server.sometimes((1,), fault="status 500")
    assert run_bench(*flags).status == 1
    small_server.bodies.clear()
    assert run_bench(*flags[:-1]).status == 0


def test_a_server_that_is_not_there_is_told(run_bench: "RunBench") -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    flags = ("--num-requests", "1", "--ready-timeout-seconds")
    at_once = run_bench(*flags, "0", url=url)
    assert at_once.status == 1
    (line,) = at_once.errors.splitlines()
    assert line.startswith(f"headway bench: {url}/version does not answer (ConnectionRefusedError")
    assert line.endswith("; start the server, or name another with --base-url")
    waited = run_bench(*flags, "0.05", url=url)
    assert waited.status == 1
    waiting, gave_up = waited.errors.splitlines()
    assert waiting.startswith(f"headway bench: waiting up to 0.05 s: {url}/version does not answer")
    assert gave_up.endswith("name another with --base-url (waited 0.05 s, --ready-timeout-seconds)")


def test_a_server_that_is_still_starting_is_waited_for(
    small_server: "SmallServer", run_bench: "RunBench", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_bench.session.READY_POLL_SECONDS", 0.01)
    starting = small_server.behaviour(fault="status 503")
    small_server.behave = lambda number: starting if number < 3 else small_server.behaviour()
    done = run_bench("--num-requests", "2", *SHORT)
    assert (done.status, done.summary["num_completed"]) == (0, 2)
    (line,) = done.errors.splitlines()
    assert line.startswith(f"headway bench: waiting up to 600 s: {small_server.url}/v1/chat/completions")
    assert "the engine is starting" in line
    small_server.bodies.clear()
    refused = run_bench("--num-requests", "2", *SHORT, "--ready-timeout-seconds", "0")
    assert refused.status == 1
    assert len(small_server.bodies) == 1
    assert "wait longer with --ready-timeout-seconds" in refused.errors


def test_a_server_that_dies_under_the_load_is_counted(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.sometimes(range(100), fault="drop first")
    done = run_bench("--concurrency", "2", "--duration-seconds", "0.5", *SHORT)
    failures = done.summary["failures"]
    assert set(failures) == {"disconnected"}
    # Each of two users pauses 100 ms after a failure: no storm.
    assert 4 <= failures["disconnected"]["count"] <= 12
    assert "no request completed" in done.output
    # Without --fail-on-error, too: nothing was measured.
    assert done.status == 1
    assert "headway bench: no request completed, so nothing was measured" in done.errors


def test_an_interrupt_prints_what_was_measured(small_server: "SmallServer", tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    enough = threading.Event()

    small_server.sometimes(range(11, 50), fault="hang")
    planned = small_server.behave

    def behave(number: int) -> "Behaviour":
        if number == 12:  # the probe, eleven good ones, and the first that hangs
            enough.set()
        return planned(number)

    small_server.behave = behave
    flags = ["--base-url", small_server.url, "--concurrency", "1", "--num-requests", "50", *SHORT]
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "bench", *flags, "--json", str(report), "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert enough.wait(60)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "11 completed, 0 failed, 1 interrupted" in output
    assert "interrupted: this is what was measured until then" in output
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["conditions"]["was_interrupted"] is True
    assert written["points"][0]["summary"]["num_completed"] == 11

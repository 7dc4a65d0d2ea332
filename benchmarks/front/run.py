"""What one server's HTTP side can carry, with an engine that costs nothing.

    python -m benchmarks.front.run [--seconds 6] [--rounds 3] [--output benchmarks/front/results.md]

Engine, HTTP processes and load are processes of one machine. Rows: streamed tokens at several rates over 256
streams, on one HTTP process and on two; the same while long prompts are tokenized; and the floor below all of
them: the same bytes from a process that only sends what it has made before (`floor.py`).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.load import WARM_UP_SECONDS
from benchmarks.front.model_folder import make_model_folder
from benchmarks.front.page import describe_conditions, render
from benchmarks.front.rows import NUM_STREAMS, ROWS, Row
from benchmarks.front.server import MOST_STEPS, STEPS_VARIABLE, TIMES_VARIABLE

START_TIMEOUT_SECONDS = 60.0
REPOSITORY = Path(__file__).resolve().parents[2]
PROBE_SECONDS = 0.05
LONG_PROMPT_CHARACTERS = 100_000


@dataclass(slots=True)
class Server:
    """A running server and the processes that belong to it."""

    port: int
    pid: int
    engine_pid: int
    front_pids: list[int]


@contextmanager
def running_server(folder: Path, steps_per_second: float, num_servers: int) -> Iterator[Server]:
    """A server whose engine emits at that pace."""
    port_file, times = folder / f"port-{time.monotonic_ns()}", folder / "times"
    with times.open("wb") as file:
        file.truncate(MOST_STEPS * 8)
    flags = [str(folder), "--port=0", f"--port-file={port_file}", "--max-num-seqs=2048"]
    flags += ["--log-level=warning", f"--api-server-count={num_servers}"]
    environment = {**os.environ, STEPS_VARIABLE: str(steps_per_second), TIMES_VARIABLE: str(times)}
    command = [sys.executable, "-m", "benchmarks.front.server", *flags]
    with subprocess.Popen(command, env=environment, cwd=REPOSITORY) as process:
        try:
            give_up_at = time.monotonic() + START_TIMEOUT_SECONDS
            while not (port_file.exists() and _is_ready(int(port_file.read_text()))):
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise SystemExit("the server did not start")
                time.sleep(0.05)
            children = _children(process.pid)
            (engine_pid,) = [pid for pid, command in children.items() if "--engine" in command]
            fronts = [pid for pid in children if pid != engine_pid] or [process.pid]
            yield Server(int(port_file.read_text()), process.pid, engine_pid, fronts)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(port: int) -> bool:
    try:
        return _get(port, "/ready")[0] == 200
    except OSError:
        return False


def _get(port: int, path: str, connection: socket.socket | None = None) -> tuple[int, socket.socket]:
    connection = connection or socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
    data = b""
    while b"}" not in data:
        received = connection.recv(65536)
        if not received:
            raise OSError("closed")
        data += received
    return int(data[9:12]), connection


def _children(pid: int) -> dict[int, str]:
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stolen_seconds() -> float:
    """Processor time that this machine wanted and its host gave to others."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


class Probe:
    """Asks /health again and again, on one connection and on new ones in turn.

    slowest_at: when the slowest answer was asked for, in seconds since the first.
    """

    def __init__(self, port: int) -> None:
        self.milliseconds: list[float] = []
        self.slowest_at = 0.0
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(20)

    def _repeat(self) -> None:
        kept: socket.socket | None = None
        number = 0
        begun_at = time.monotonic()
        while not self._stop.wait(PROBE_SECONDS):
            number += 1
            started_at = time.monotonic()
            status, connection = _get(self._port, "/health", kept if number % 2 else None)
            milliseconds = (time.monotonic() - started_at) * 1000.0
            if milliseconds > max(self.milliseconds, default=0.0):
                self.slowest_at = started_at - begun_at
            self.milliseconds.append(milliseconds)
            assert status == 200
            if number % 2:
                kept = connection
            else:
                connection.close()


class LongPrompts:
    """Keeps several long prompts on their way until stopped."""

    def __init__(self, port: int, number: int) -> None:
        words = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
        text = (words * (LONG_PROMPT_CHARACTERS // len(words) + 1))[:LONG_PROMPT_CHARACTERS]
        body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._port = port
        self._stop = threading.Event()
        self.num_answered = 0
        self._threads = [threading.Thread(target=self._repeat, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _repeat(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as connection:
            while not self._stop.is_set():
                connection.sendall(self._request)
                data = b""
                while not data.endswith(b"}"):
                    received = connection.recv(65536)
                    assert received
                    data += received
                assert data.startswith(b"HTTP/1.1 200"), data
                self.num_answered += 1

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def measure(row: Row, folder: Path, seconds: float) -> dict[str, float]:
    """One run of one row."""
    pace = row.tokens_per_second / NUM_STREAMS
    if row.num_servers == 0:
        return _measure_floor(row, folder, pace, seconds)
    with running_server(folder, pace, row.num_servers) as server:
        probe = Probe(server.port)
        prompts = LongPrompts(server.port, row.long_prompts)
        pids = (server.engine_pid, *server.front_pids)
        before, stolen_before = [processor_seconds(pid) for pid in pids], stolen_seconds()
        probe.start()
        report = _load(row, server.port, folder, seconds)
        used = [processor_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]
        prompts.end()
        probe.end()
    num_tokens = report["streams"] * row.num_tokens
    report["engine_microseconds"] = used[0] * 1e6 / num_tokens
    report["front_microseconds"] = sum(used[1:]) * 1e6 / num_tokens
    ordered = sorted(probe.milliseconds)
    report["health_p99_milliseconds"] = ordered[int(len(ordered) * 0.99)]
    report["health_worst_milliseconds"] = ordered[-1]
    report["health_slowest_at_seconds"] = probe.slowest_at
    report["stolen_seconds"] = stolen_seconds() - stolen_before
    report["long_prompts_per_second"] = prompts.num_answered / report["seconds"]
    return report


def _load(row: Row, port: int, folder: Path, seconds: float) -> dict[str, float]:
    arguments = [port, NUM_STREAMS, seconds, row.num_tokens, folder, folder / "times"]
    command = [sys.executable, "-m", "benchmarks.front.load", *map(str, arguments)]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, timeout=seconds * 10 + 120, cwd=REPOSITORY
    ).stdout
    report: dict[str, float] = json.loads(output)
    report["load_microseconds"] = report["processor_seconds"] * 1e6 / (report["streams"] * row.num_tokens)
    return report


def _measure_floor(row: Row, folder: Path, pace: float, seconds: float) -> dict[str, float]:
    times, port_file = folder / "times", folder / f"port-{time.monotonic_ns()}"
    with times.open("wb") as file:
        file.truncate(MOST_STEPS * 8)
    arguments = [folder, times, port_file, NUM_STREAMS, row.num_tokens]
    command = [sys.executable, "-m", "benchmarks.front.floor", *map(str, arguments)]
    with subprocess.Popen(command, env={**os.environ, STEPS_VARIABLE: str(pace)}, cwd=REPOSITORY) as process:
        try:
            give_up_at = time.monotonic() + START_TIMEOUT_SECONDS
            while not (port_file.exists() and port_file.read_text()):
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise SystemExit("the floor's server did not start")
                time.sleep(0.05)
            before = processor_seconds(process.pid)
            report = _load(row, int(port_file.read_text()), folder, seconds)
            spent = processor_seconds(process.pid) - before
        finally:
            process.kill()
    report["front_microseconds"] = spent * 1e6 / (report["streams"] * row.num_tokens)
    return report


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Measure the HTTP side.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    if options.seconds <= WARM_UP_SECONDS:
        parser.error(f"--seconds={options.seconds:g}: give more than the warm-up takes, {WARM_UP_SECONDS:g}")
    load_before = os.getloadavg()[0]
    reports: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder, REPOSITORY / "docs")
        for number in range(options.rounds):
            for row in ROWS:
                if options.only and options.only not in row.name:
                    continue
                report = measure(row, folder, options.seconds)
                reports.setdefault(row.name, []).append(report)
                print(f"round {number + 1}, {row.name}: {json.dumps(report)}", file=sys.stderr, flush=True)
    page = render(reports, describe_conditions(options.rounds, options.seconds, load_before))
    print(page)
    if options.output is not None:
        options.output.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

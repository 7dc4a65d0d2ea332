"""What one server's HTTP side can carry, with an engine that costs nothing.

    python -m benchmarks.front.run [--seconds 6] [--rounds 3] [--output benchmarks/front/results.md]

Engine, HTTP processes and load are processes of one machine. Rows: streamed tokens at several rates over 256
streams, on one HTTP process and on two; the same while long prompts are tokenized; and the floor below all of
them: the same bytes from a process that only sends what it has made before (`floor.py`).
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.front.load import WARM_UP_SECONDS
from benchmarks.front.model_folder import make_model_folder
from benchmarks.front.server import MOST_STEPS, STEPS_VARIABLE, TIMES_VARIABLE

START_TIMEOUT_SECONDS = 60.0
NUM_STREAMS = 256
REPOSITORY = Path(__file__).resolve().parents[2]
PROBE_SECONDS = 0.05
# Of one HTTP process: tokens a second, what is added to each token at P99, and the slowest answer of /health
# at every rate up to that.
GOAL_TOKENS, GOAL_P99_MILLISECONDS, GOAL_HEALTH_MILLISECONDS = 20_000, 20.0, 50.0
LONG_PROMPT_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One load.

    tokens_per_second: 0 means as fast as it goes. num_tokens: of each answer. num_servers: HTTP processes, 0
    for the floor. long_prompts: so many are kept on their way all the time.
    """

    name: str
    tokens_per_second: int
    num_tokens: int
    num_servers: int = 1
    long_prompts: int = 0


ROWS = (
    Row("20,000 tokens/s, floor", 20_000, 400, num_servers=0),
    Row("as fast as it goes, floor", 0, 2000, num_servers=0),
    Row("10,000 tokens/s", 10_000, 200),
    Row("20,000 tokens/s", 20_000, 400),
    Row("20,000 tokens/s, answers of 64 tokens", 20_000, 64),
    Row("20,000 tokens/s, two HTTP processes", 20_000, 400, num_servers=2),
    Row("30,000 tokens/s", 30_000, 600),
    Row("as fast as it goes", 0, 1000),
    Row("as fast as it goes, two HTTP processes", 0, 1000, num_servers=2),
    Row("10,000 tokens/s, 4 prompts of 100,000 characters at a time", 10_000, 200, long_prompts=4),
)


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


class Probe:
    """Asks /health again and again, on one connection and on new ones in turn."""

    def __init__(self, port: int) -> None:
        self.milliseconds: list[float] = []
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
        while not self._stop.wait(PROBE_SECONDS):
            number += 1
            started_at = time.monotonic()
            status, connection = _get(self._port, "/health", kept if number % 2 else None)
            self.milliseconds.append((time.monotonic() - started_at) * 1000.0)
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
        before = [processor_seconds(pid) for pid in pids]
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


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("P50 ms", "p50_milliseconds", ".1f"),
    ("P99 ms", "p99_milliseconds", ".1f"),
    ("spread P50 ms", "spread_p50_milliseconds", ".1f"),
    ("HTTP CPU, µs/token", "front_microseconds", ".1f"),
    ("engine CPU", "engine_microseconds", ".1f"),
    ("load CPU", "load_microseconds", ".1f"),
    ("/health P99 ms", "health_p99_milliseconds", ".1f"),
    ("worst ms", "health_worst_milliseconds", ".1f"),
)
_JUDGED = ("tokens_per_second", "p99_milliseconds", "health_worst_milliseconds")
_LEGEND = """\
*tokens/s*: delivered in the steady middle of the run, after its first second and before its last streams are
left to end. *P50, P99*: from the moment the engine's step had the token to the moment the client's thread had
read it, over all tokens of that middle; the client's own time to read 256 sockets one after the other is in
it, as the floor shows. *spread*: from the first to the last stream's receipt of one step's tokens. *CPU*:
processor time of all HTTP processes, of the engine process and of the client, in user and system mode, for
each token, with what beginning and ending the requests costs; unlike times it hardly depends on what else the
machine does. */health*: asked every 50 ms on a kept connection and on new ones in turn, from before the 256
requests are sent at once.
"""
# What is explained only where there are such rows.
_LEGEND_OF_ROWS = {
    "floor": "*floor*: the same bytes from a process that only sends what it has made before.\n",
    "as fast as it goes": (
        "*as fast as it goes*: the engine does not wait between steps, so P50 and P99 are time in buffers.\n"
    ),
    "at a time": "*(N/s)*: long prompts answered per second besides.\n",
}


def render(reports: dict[str, list[dict[str, float]]], conditions: str) -> str:
    """The results page: medians over rounds, and of what is a worst the worst of all."""
    lines = [
        "# What the HTTP side carries",
        "",
        "Written by `python -m benchmarks.front.run`: 256 streams, an engine that costs nothing; every",
        "number is a median over rounds, but for the worst, which is that of all rounds.",
        "",
        conditions,
        "",
        "| load | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "| --- |" + " ---: |" * len(_COLUMNS),
    ]
    for name, rounds in reports.items():
        cells = [
            format(_over_rounds(key, [report[key] for report in rounds]), form) if key in rounds[0] else ""
            for _, key, form in _COLUMNS
        ]
        prompts = statistics.median(report.get("long_prompts_per_second", 0.0) for report in rounds)
        shown = f"{name} ({prompts:.0f}/s)" if prompts else name
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    legend = [text for word, text in _LEGEND_OF_ROWS.items() if any(word in name for name in reports)]
    left_out = [row.name for row in ROWS if row.name not in reports]
    if left_out:
        legend.append(f"Rows left out of this run: {'; '.join(left_out)}.\n")
    return "\n".join([*lines, "", *verdicts(reports), "", _LEGEND + "".join(legend)])


def verdicts(reports: dict[str, list[dict[str, float]]]) -> list[str]:
    """The goals beside what one process did at each rate that it was asked for."""
    lines = []
    for row in ROWS:
        if row.name not in reports or row.num_servers != 1 or not row.tokens_per_second:
            continue
        shown = {key: _over_rounds(key, [one[key] for one in reports[row.name]]) for key in _JUDGED}
        tokens, p99, health = shown.values()
        carried = tokens >= 0.98 * row.tokens_per_second and p99 < GOAL_P99_MILLISECONDS
        said = f"{tokens:,.0f} tokens/s with {p99:.1f} ms at P99 "
        said += f"(goal {GOAL_P99_MILLISECONDS:g}: {_met(carried)})"
        if row.tokens_per_second <= GOAL_TOKENS:
            is_quick = health < GOAL_HEALTH_MILLISECONDS
            said += f"; slowest /health {health:.1f} ms (goal {GOAL_HEALTH_MILLISECONDS:g}: {_met(is_quick)})"
        lines.append(f"- {row.name}: {said}")
    return lines


def _met(is_met: bool) -> str:  # noqa: FBT001
    return "met" if is_met else "missed"


def _over_rounds(key: str, values: list[float]) -> float:
    return max(values) if "worst" in key else statistics.median(values)


def describe_conditions(rounds: int, seconds: float, load_before: float) -> str:
    """What must be known to read the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    ).stdout.strip()
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if "model name" in line
    ]
    packages = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "uvloop", "pyzmq", "tokenizers"))
    machine = f"{os.cpu_count()} CPUs ({models[0] if models else platform.processor()})"
    is_real_time = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    urgency = "real-time class" if is_real_time else f"niceness {os.getpriority(os.PRIO_PROCESS, 0)}"
    parts = [
        f"Machine: {machine}, shared by engine, HTTP processes and load.",
        f"Load average: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after; {urgency}.",
        f"Python {platform.python_version()}, {packages}.",
        f"Commit {commit or 'unknown'}; {rounds} rounds of {seconds:g} s for each load.",
    ]
    return "\n".join(f"- {part}" for part in parts)


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

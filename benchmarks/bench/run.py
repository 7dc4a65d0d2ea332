"""What `headway bench` costs and how far its times are off: its load against a server of known delays.

    python -m benchmarks.bench.run [--rounds 3] [--seconds 10] [--output benchmarks/bench/results.md]

The server (`server.py`) is a process of its own; the client is held to one core. The error of a TTFT is what
the client measured less what the server says that it took, request by request: loopback and both event loops.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

DELAY_MILLISECONDS = 50.0
PACE_MILLISECONDS = 10.0
TOKENS = 32
RATES = (100, 250, 500, 750)
CLIENTS = ("headway bench", "aiohttp")


@dataclass(frozen=True, slots=True)
class Run:
    """One client at one rate."""

    due_per_second: float
    sent_per_second: float
    cpu_seconds: float
    wall_seconds: float
    num_requests: int
    lags_milliseconds: Sequence[float]
    errors_milliseconds: Sequence[float]

    @property
    def microseconds_each(self) -> float:
        """Processor time for each request."""
        return 1e6 * self.cpu_seconds / self.num_requests


@contextmanager
def running_server() -> Iterator[int]:
    """The clock server's port."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench.server",
        str(DELAY_MILLISECONDS),
        str(PACE_MILLISECONDS),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def run_client(client: str, port: int, rate: int, seconds: float) -> Run:
    """Run one client on one core."""
    if client == "aiohttp":
        arguments = ["benchmarks.bench.aiohttp_client", str(port), str(rate), str(seconds), str(TOKENS)]
        report = json.loads(_on_one_core(arguments, seconds))
        return Run(
            report["due_per_second"],
            report["sent_per_second"],
            report["cpu_seconds"],
            report["wall_seconds"],
            report["requests"],
            report["lags_milliseconds"],
            report["errors_milliseconds"],
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        flags = ["--base-url", f"http://127.0.0.1:{port}", "--request-rate", str(rate), "--quiet"]
        flags += ["--num-requests", str(int(rate * seconds)), "--input-length", "128", "--fail-on-error"]
        flags += ["--output-length", str(TOKENS), "--json", str(path), "--save-requests"]
        _on_one_core(["headway", "bench", *flags], seconds)
        return _read_report(json.loads(path.read_text(encoding="utf-8")))


def _read_report(report: dict[str, Any]) -> Run:
    (point,) = report["points"]
    summary, requests = point["summary"], point["requests"]
    client = summary["client"]
    due = [request["due"] for request in requests]
    return Run(
        1000 * (len(due) - 1) / (due[-1] - due[0]),
        summary["sending_per_second"],
        client["cpu_seconds"],
        client["cpu_seconds"] / client["cpu_share_of_one_core"],
        len(requests),
        [request["sent"] - request["due"] for request in requests],
        [r["event_times"][0] - r["sent"] - r["cached_tokens"] / 1000 for r in requests],
    )


def _on_one_core(arguments: Sequence[str], seconds: float) -> bytes:
    core = max(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        timeout=10 * seconds + 60,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return done.stdout


def measure(rounds: int, seconds: float) -> dict[tuple[str, int], list[Run]]:
    """Every client at every rate, in turns."""
    runs: dict[tuple[str, int], list[Run]] = {(client, rate): [] for rate in RATES for client in CLIENTS}
    with running_server() as port:
        for number in range(rounds):
            for rate in RATES:
                for client in CLIENTS if number % 2 == 0 else reversed(CLIENTS):
                    runs[client, rate].append(run_client(client, port, rate, seconds))
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return runs


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def render(runs: dict[tuple[str, int], list[Run]], conditions: Sequence[str]) -> str:
    """The results page."""
    columns = [
        "client",
        "offered/s",
        "due/s",
        "sent/s",
        "sent late P50 / P99 / max, ms",
        "CPU each, µs",
        "of a core",
        "TTFT error P50 / P99, ms",
    ]
    lines = [
        "# What the load benchmark costs",
        "",
        "Written by `python -m benchmarks.bench.run`. Processor time and rates are medians over rounds.",
        "Lateness and error are of the round with the least: a neighbour's work makes one late, never early.",
        "",
        *(f"- {condition}" for condition in conditions),
        "",
        f"| {' | '.join(columns)} |",
        "| --- |" + 7 * " ---: |",
    ]
    for (client, rate), each in runs.items():
        calmest = min(each, key=lambda run: percentile(run.lags_milliseconds, 99))
        lags = [percentile(calmest.lags_milliseconds, p) for p in (50, 99, 100)]
        errors = [percentile(calmest.errors_milliseconds, p) for p in (50, 99)]
        lines.append(
            f"| {client} | {rate} | {statistics.median([run.due_per_second for run in each]):.1f} "
            f"| {statistics.median([run.sent_per_second for run in each]):.1f} "
            f"| {lags[0]:.2f} / {lags[1]:.2f} / {lags[2]:.1f} "
            f"| {statistics.median([run.microseconds_each for run in each]):.0f} "
            f"| {100 * statistics.median([run.cpu_seconds / run.wall_seconds for run in each]):.0f}% "
            f"| {errors[0]:.2f} / {errors[1]:.2f} |"
        )
    return "\n".join([*lines, "", _LEGEND])


_LEGEND = f"""\
Each request asks 128 words and is answered with {TOKENS} events, the first after {DELAY_MILLISECONDS:g} ms
and one each {PACE_MILLISECONDS:g} ms after it. Arrivals are Poisson; *due/s* is what the draw came to. *Sent
late*: after the request was due. *CPU each*: user and system time of the client for one request with all its
events, the waiting for the next one's time included. *TTFT error*: measured by the client, less the server's
own account of that request. The row of aiohttp is a plain client (`aiohttp_client.py`) that keeps
fewer numbers.
"""


def describe_conditions(rounds: int, seconds: float, load_before: float) -> list[str]:
    """What must be known to read the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    load = f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    versions = ", ".join(f"{name} {version(name)}" for name in ("httptools", "aiohttp", "uvloop"))
    return [
        f"Machine: {os.cpu_count()} CPUs ({model}); the client on one of them.",
        f"Load average: {load}; above the number of CPUs, some of what is late waited for a processor.",
        f"Python {platform.python_version()}, {versions}.",
        f"Commit {commit}; {rounds} rounds of {seconds:g} s for each client and rate.",
    ]


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Measure the load benchmark itself.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    runs = measure(options.rounds, options.seconds)
    page = render(runs, describe_conditions(options.rounds, options.seconds, load_before))
    print(page)
    if options.output is not None:
        options.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

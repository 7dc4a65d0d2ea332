"""What the gateway adds: the same load direct to a replica and through the gateway, in turns.

    python -m benchmarks.gateway.run [--rounds 7] [--seconds 2] [--output benchmarks/gateway/results.md]

Replica, gateway and load are three processes of one machine. Each round measures every load both ways, one
right after the other, and the table gives medians over the rounds: a neighbour's load hits both sides alike.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

START_TIMEOUT_SECONDS = 30.0


_LEGEND = """\
*per second*: requests, or events of all streams. *ms*: a request's time, or the time from the moment the
replica writes an event to the moment the client has read it. *added*: the median over rounds of the
difference within a round. *each*: for each request or event; unlike the others it hardly depends on what
else the machine does. For streams as fast as they go, the time of an event is time in buffers.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One row of the table: the arguments of `load.py`."""

    name: str
    kind: str
    connections: int
    events: int = 0
    pace_milliseconds: float = 0.0

    def run(self, port: int, seconds: float) -> dict[str, float]:
        """Measure it against one port."""
        arguments = [str(port), self.kind, str(self.connections), str(seconds)]
        if self.kind == "stream":
            arguments += [str(self.events), str(self.pace_milliseconds)]
        command = [sys.executable, "-m", "benchmarks.gateway.load", *arguments]
        output = subprocess.run(command, check=True, capture_output=True, timeout=seconds * 5 + 60).stdout
        report: dict[str, float] = json.loads(output)
        return report


LOADS = (
    Load("one request at a time", "requests", 1),
    Load("64 requests at a time", "requests", 64),
    Load("16 streams, an event every 20 ms each", "stream", 16, events=50, pace_milliseconds=20),
    Load("128 streams, an event every 50 ms each", "stream", 128, events=20, pace_milliseconds=50),
    Load("16 streams as fast as they go", "stream", 16, events=2000),
)


@contextmanager
def running_replica() -> Iterator[int]:
    """A replica's port."""
    command = [sys.executable, "-m", "benchmarks.gateway.replica"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def running_gateway(replica_port: int) -> Iterator[tuple[int, int]]:
    """The port and the process id of a gateway in front of that replica."""
    with tempfile.TemporaryDirectory() as folder:
        table, port_file = Path(folder, "table"), Path(folder, "port")
        row = {"id": "replica", "url": f"http://127.0.0.1:{replica_port}", "state": "ready"}
        table.write_text(json.dumps({"version": 1, "backends": [row]}))
        flags = ["--port", "0", "--port-file", str(port_file), "--backends-file", str(table)]
        with subprocess.Popen([sys.executable, "-m", "headway", "gateway", *flags]) as process:
            try:
                give_up_at = time.monotonic() + START_TIMEOUT_SECONDS
                while not port_file.exists():
                    if process.poll() is not None or time.monotonic() > give_up_at:
                        raise SystemExit("the gateway did not start")
                    time.sleep(0.01)
                yield int(port_file.read_text()), process.pid
            finally:
                process.kill()


def measure(rounds: int, seconds: float) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Load name -> "direct" or "gateway" -> one report a round."""
    reports: dict[str, dict[str, list[dict[str, float]]]] = {
        load.name: {"direct": [], "gateway": []} for load in LOADS
    }
    with running_replica() as direct, running_gateway(direct) as (gateway, gateway_pid):
        ports = {"direct": direct, "gateway": gateway}
        for load in LOADS:  # warm up both ways
            for port in ports.values():
                load.run(port, 0.2)
        for number in range(rounds):
            order = ("direct", "gateway") if number % 2 == 0 else ("gateway", "direct")
            for load in LOADS:
                for way in order:
                    spent_before = processor_seconds(gateway_pid)
                    report = load.run(ports[way], seconds)
                    spent = processor_seconds(gateway_pid) - spent_before
                    reports[load.name][way].append(
                        {**report, "microseconds_each": spent * 1e6 / report["number"]}
                    )
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return reports


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def render(reports: dict[str, dict[str, list[dict[str, float]]]], conditions: str) -> str:
    """The results page."""

    def median(name: str, way: str, key: str) -> float:
        return statistics.median(report[key] for report in reports[name][way])

    lines = [
        "# What the gateway adds",
        "",
        "Written by `python -m benchmarks.gateway.run`; every number is a median over rounds.",
        "",
        conditions,
        "",
        "| load | way | per second | P50 ms | P99 ms | gateway's CPU, µs each |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for load in LOADS:
        for way in ("direct", "gateway"):
            rate = median(load.name, way, "per_second")
            middle, tail = (median(load.name, way, f"p{percent}_milliseconds") for percent in (50, 99))
            spent = f"{median(load.name, way, 'microseconds_each'):,.0f}" if way == "gateway" else ""
            lines.append(f"| {load.name} | {way} | {rate:,.0f} | {middle:.2f} | {tail:.2f} | {spent} |")
        added = [
            statistics.median(
                through[key] - direct[key]
                for through, direct in zip(
                    reports[load.name]["gateway"], reports[load.name]["direct"], strict=True
                )
            )
            for key in ("p50_milliseconds", "p99_milliseconds")
        ]
        lines.append(f"| | *added* | | *{added[0]:+.2f}* | *{added[1]:+.2f}* | |")
    return "\n".join([*lines, "", _LEGEND])


def describe_conditions(rounds: int, seconds: float, load_before: float) -> str:
    """What must be known to read the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()
    model = next(
        (
            x.partition(":")[2].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        platform.processor(),
    )
    parts = [
        f"Machine: {os.cpu_count()} CPUs ({model}), shared by replica, gateway and load.",
        f"Load average: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.",
        f"Python {platform.python_version()}, aiohttp {version('aiohttp')}, uvloop {version('uvloop')}.",
        f"Commit {commit}; {rounds} rounds of {seconds:g} s for each load and way.",
    ]
    return "\n".join(f"- {part}" for part in parts)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Measure what the gateway adds.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    reports = measure(options.rounds, options.seconds)
    page = render(reports, describe_conditions(options.rounds, options.seconds, load_before))
    print(page)
    if options.output is not None:
        options.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

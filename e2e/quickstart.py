"""`make quickstart`: Headway repairs a broken latency target while you watch.

Starts `headway up` on the bundled model, asks it one question, then sends more load than the first limits
can carry and prints replicas and limits as the controller moves them. Exit status 0 means: the target was
broken, is kept now under the same load, no request failed, and no process was left behind.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from e2e.load import Load, ttft_milliseconds

MANIFEST = Path(__file__).parent / "manifests" / "quickstart.yaml"
MODEL = "demo"  # a service's model answers to the service's name
PROMPTS = ["Count from 1 to 40.", "Tell me a story.", "Count from 20 to 60.", "Count from 5 to 50."]
START_SECONDS = 60.0
SIGNAL_SECONDS = 0.5  # signals that come together count as one
BEFORE_SECONDS = 8.0  # the first seconds of the load, before the controller can have acted
AFTER_SECONDS = 12.0  # the last seconds, on which the verdict stands
ANSWERED_SECONDS = 2.0  # of requests sent later than that, the slow ones may not have a token yet
LOAD_SECONDS = 150.0
MORE_USERS = 12  # join when limits alone keep the target, so that a fast machine needs its second replica too


@dataclass(frozen=True, slots=True)
class Seen:
    """What the service's status says at one instant, flattened for a line of output."""

    ready: int
    wanted: int
    max_num_seqs: int
    max_num_batched_tokens: int


def main() -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m e2e.quickstart", description=__doc__)
    parser.add_argument("--users", type=int, default=24, help="users who ask one question after the other")
    arguments = parser.parse_args()
    try:
        return asyncio.run(demonstrate(arguments.users))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


async def demonstrate(users: int) -> int:
    """Serve, ask, load, judge. Told to stop, it stops what it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    target = float(yaml.safe_load(MANIFEST.read_text())["spec"]["slo"]["ttftMilliseconds"])
    with tempfile.TemporaryDirectory(prefix="headway-quickstart-") as folder:
        status_file = Path(folder) / "status.json"
        async with _headway_up(status_file) as (up, url, started_at):
            await _ask(url, started_at)
            load = Load(f"{url}/v1", MODEL, PROMPTS, max_tokens=160)
            load_at = time.monotonic()
            try:
                await load.start(users)
                moved = await _watch(load, load_at, target, status_file, up)
                ended_at = time.monotonic() - ANSWERED_SECONDS
                await load.stop()
            finally:
                await load.abandon()
            family = psutil.Process(up.pid).children(recursive=True)
    return _verdict(load, load_at, ended_at, target, moved=moved, survivors=_survivors(family))


@contextlib.asynccontextmanager
async def _headway_up(status_file: Path) -> AsyncIterator[tuple[Process, str, float]]:
    port = _free_port()
    command = [
        "up",
        "-f",
        str(MANIFEST),
        "--port",
        str(port),
        "--status-file",
        str(status_file),
        "--no-table",
    ]
    print(f"$ headway {' '.join(command)}", flush=True)
    started_at = time.monotonic()
    up = await asyncio.create_subprocess_exec(sys.executable, "-m", "headway", *command)
    # After a failure, or told to stop, nobody waits for what users still ask: a second signal says so.
    signals = 2
    try:
        url = f"http://127.0.0.1:{port}"
        await _wait_until_ready(url, up)
        yield up, url, started_at
        signals = 1
    finally:
        for _ in range(signals):
            if up.returncode is None:
                up.terminate()
                await asyncio.sleep(SIGNAL_SECONDS)
        try:
            await asyncio.wait_for(up.wait(), START_SECONDS)
        except TimeoutError:
            up.kill()  # gateway and replicas end with it
            raise


async def _wait_until_ready(url: str, up: Process) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while True:
            if up.returncode is not None:
                raise SystemExit(f"headway up ended with status {up.returncode}; its messages stand above")
            if time.monotonic() > deadline:
                raise SystemExit(f"headway up was not ready within {START_SECONDS:.0f} s")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


async def _ask(url: str, started_at: float) -> None:
    question = "What is 27 + 15?"
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"the first question was answered with HTTP {response.status}: {answer}")
    print(f"\nfrom start to the first answer: {time.monotonic() - started_at:.1f} s")
    print(f"> {question}\n{answer['choices'][0]['message']['content']}\n", flush=True)


async def _watch(load: Load, load_at: float, target: float, status_file: Path, up: Process) -> bool:
    """Print a line every two seconds until more than one replica has kept the target for a while.

    Returns whether both the batch limits and the number of ready replicas rose on the way.
    """
    first = seen = _read_status(status_file)
    most_seqs = first.max_num_seqs
    print(f"load: closed loop, target P95 TTFT {target:.0f} ms")
    print(f"{'time':>6} {'replicas':>9} {'seqs':>5} {'tokens':>7} {'P95 TTFT':>9} {'sent':>6} {'failed':>7}")
    judge_at = load_at + BEFORE_SECONDS + AFTER_SECONDS
    while time.monotonic() < load_at + LOAD_SECONDS:
        await asyncio.sleep(2)
        if up.returncode is not None:
            raise SystemExit(f"headway up ended with status {up.returncode} under load")
        now, seen = time.monotonic(), _read_status(status_file)
        most_seqs = max(most_seqs, seen.max_num_seqs)
        recent = ttft_milliseconds(load.outcomes, now - 6, now - 1)
        print(
            f"{now - load_at:5.0f}s {seen.ready:>4}/{seen.wanted:<4} {seen.max_num_seqs:>5} "
            f"{seen.max_num_batched_tokens:>7} {'-' if recent is None else f'{recent:.0f} ms':>9} "
            f"{load.sent:>6} {len(load.failures):>7}",
            flush=True,
        )
        answered = now - ANSWERED_SECONDS
        kept = ttft_milliseconds(load.outcomes, answered - AFTER_SECONDS, answered)
        if now < judge_at or kept is None or kept > target:
            continue
        if seen.ready > 1:
            break
        if seen.wanted == 1:
            print(f"the limits alone keep the target: {MORE_USERS} users more", flush=True)
            await load.start(MORE_USERS)
            judge_at = now + AFTER_SECONDS
    return seen.ready > 1 and most_seqs > first.max_num_seqs


def _read_status(status_file: Path) -> Seen:
    status: dict[str, Any] = json.loads(status_file.read_text())
    limits = status.get("limits") or {}
    return Seen(
        ready=status.get("readyReplicas") or 0,
        wanted=status.get("desiredReplicas") or 0,
        max_num_seqs=limits.get("maxNumSeqs") or 0,
        max_num_batched_tokens=limits.get("maxNumBatchedTokens") or 0,
    )


def _verdict(
    load: Load, load_at: float, ended_at: float, target: float, *, moved: bool, survivors: list[str]
) -> int:
    before = ttft_milliseconds(load.outcomes, load_at, load_at + BEFORE_SECONDS)
    after = ttft_milliseconds(load.outcomes, ended_at - AFTER_SECONDS, ended_at)
    broken = before is not None and before > target
    seen = f"before: {_milliseconds(before)}   after: {_milliseconds(after)}   target: {target:.0f} ms"
    print(f"\nP95 TTFT {seen}")
    print(f"requests sent: {load.sent}   failed: {len(load.failures)}")
    for outcome in load.failures[:5]:
        print(f"  failed after {outcome.finished_at - outcome.sent_at:.1f} s: {outcome.error}")
    print(f"processes left behind: {len(survivors)} {' '.join(survivors)}")
    faults = [
        ("the load did not break the target; more --users would", not broken),
        ("limits and replicas did not both rise", not moved),
        ("the target was not kept in the end", after is None or after > target),
        ("requests failed", bool(load.failures)),
        ("processes were left behind", bool(survivors)),
    ]
    found = [text for text, is_so in faults if is_so]
    print("quickstart: " + ("; ".join(found) if found else "the promise was broken, repaired and kept"))
    return 1 if found else 0


def _survivors(family: list[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(family, timeout=5)
    return [f"{process.pid} ({process.name()})" for process in alive]


def _milliseconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} ms"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())

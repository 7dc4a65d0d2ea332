"""Starts the other ranks of a node as processes, and says how they ended. Who starts them must outlive them.

A rank's standard input is its launch, one line of JSON, and then its lifeline: when that reaches its end, so
does the rank. On Linux the kernel ends it, too, with the thread that started it, even where it is stopped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

RANK_COMMAND: tuple[str, ...] = (sys.executable, "-m", "headway_runtime.parallel.worker")


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """What a rank is told by who starts it.

    host, port: where rank 0 listens. token: see `messages.Hello`. parent_pid: of who starts it.
    model_path, num_threads: of this node; None: as rank 0 has them.
    has_far_leader: rank 0 is on another node, whose end may come without a word.
    """

    rank: int
    node_rank: int
    local_rank: int
    host: str
    port: int
    token: str
    parent_pid: int
    timeout_seconds: float
    num_threads: int
    model_path: str | None = None
    has_far_leader: bool = False
    log_level: str = "info"


def start_rank(launch: RankLaunch, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """OSError where no process can be had."""
    threads = str(launch.num_threads)
    process = subprocess.Popen(
        RANK_COMMAND,
        stdin=subprocess.PIPE,
        env={**environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which its status tells
        os.write(process.stdin.fileno(), json.dumps(asdict(launch)).encode() + b"\n")
    return process


def end_rank(process: subprocess.Popen[bytes]) -> int:
    """Kill it if it lives; its status."""
    process.kill()
    status = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return status


def told_status(status: int) -> str:
    """How a process ended, for people."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"

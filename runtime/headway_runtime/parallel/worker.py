"""A rank above 0: a process that holds a share of the model, and computes what rank 0 calls.

    say hello -> import torch -> accepted, with rank 0's configuration -> load -> calls until rank 0 is gone

Started by `spawn` as `python -m headway_runtime.parallel.worker`. Ends with status 0 when rank 0 ends in good
order; with 1, or 2 for a wrong flag, when something went wrong, and rank 0 is told what. Never outlives who
started it, nor rank 0.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.lifeline import EXIT_STATUS_ORPHANED, die_with_parent, watch_lifeline
from headway_runtime.parallel import wire
from headway_runtime.parallel.link import answer_pings
from headway_runtime.parallel.messages import FAILED, Failed
from headway_runtime.parallel.spawn import RankLaunch
from headway_runtime.process_log import configure_logging

if TYPE_CHECKING:
    from headway_runtime.config import EngineConfig
    from headway_runtime.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

MakeRunner = Callable[["EngineConfig", "Ranks"], object]


def make_runner(config: "EngineConfig", ranks: "Ranks") -> object:
    """The real one. Imports torch."""
    from headway_runtime.runner import Runner

    return Runner(config, ranks)


def main(make: MakeRunner = make_runner) -> int:
    """Serve rank 0; returns the exit status. make: what is called."""
    # When this process ends is for rank 0 to say: a terminal sends signals to all of a group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Unbuffered, so that nothing of the lifeline is swallowed with the launch.
    line = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115 - stays open for as long as this process lives
    if not line.endswith(b"\n"):
        return EXIT_STATUS_ORPHANED
    launch = RankLaunch(**json.loads(line))
    watch_lifeline(0)
    die_with_parent(launch.parent_pid)
    configure_logging(launch.log_level)
    gc.disable()  # until the model is loaded: imports make objects, not garbage
    try:
        calls, watch, watching = _connections(launch)
    except HeadwayRuntimeError as error:
        print(f"rank {launch.rank} on node {launch.node_rank}: {error}", file=sys.stderr)
        return _status_of(error)
    try:
        _serve(launch, calls, make)
    except HeadwayRuntimeError as error:
        _tell(launch, watch, str(error), _status_of(error))
        return _status_of(error)
    except (EOFError, ConnectionError):
        return _orphaned(launch)
    except Exception as error:
        # What failed may be that others are gone, which the other thread is about to hear.
        watching.join(1.0)
        logger.exception("rank %d cannot go on", launch.rank)
        _tell(launch, watch, f"{type(error).__name__}: {error}", 1)
        return 1
    return 0


def _status_of(error: HeadwayRuntimeError) -> int:
    return error.exit_status if isinstance(error, ConfigError) else 1


def _connections(launch: RankLaunch) -> tuple[socket.socket, socket.socket, threading.Thread]:
    from headway_runtime.parallel.hellos import say_hellos

    calls, watch = say_hellos(launch)

    def on_end(is_good: bool) -> None:  # noqa: FBT001 - the type of the callback
        os._exit(0 if is_good else _orphaned(launch))

    return calls, watch, answer_pings(watch, on_end, ends_in_silence=launch.has_far_leader)


def _serve(launch: RankLaunch, calls: socket.socket, make: MakeRunner) -> None:
    from headway_runtime.parallel.follower import Follower
    from headway_runtime.parallel.hellos import await_accepted

    follower = Follower(launch, calls, await_accepted(launch, calls))
    runner = make(follower.config, follower)
    gc.freeze()
    gc.enable()
    follower.serve(runner)


def _tell(launch: RankLaunch, watch: socket.socket, message: str, status: int) -> None:
    told = f"rank {launch.rank} on node {launch.node_rank}: {message}"
    print(told, file=sys.stderr)
    with contextlib.suppress(OSError):
        watch.sendall(FAILED + wire.encode(Failed(told, status)))


def _orphaned(launch: RankLaunch) -> int:
    with contextlib.suppress(OSError):
        os.write(2, f"rank {launch.rank} (process {os.getpid()}) ends: rank 0 is gone\n".encode())
    return EXIT_STATUS_ORPHANED


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the thread that answers rank 0 may be in the middle of a read.
    os._exit(status)

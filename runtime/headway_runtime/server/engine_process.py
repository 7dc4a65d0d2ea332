"""The engine process: it makes the engine and runs the loop around it.

It ends when it is told to, when a step raises (its exit status is how its parent learns of it), or when its
parent is gone.

Started as `python -m headway_runtime.server.engine_process` with the launch as JSON in one argument.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.lifeline import die_with_parent, watch_lifeline
from headway_runtime.metrics import EngineMetrics
from headway_runtime.process_log import configure_logging
from headway_runtime.server import messages
from headway_runtime.server.engine_loop import EngineLike, EngineLoop, bind_socket

if TYPE_CHECKING:
    from headway_runtime.engine_options import EngineOptions

logger = logging.getLogger(__name__)

MakeEngine = Callable[["EngineOptions", EngineMetrics, Callable[[str], None]], EngineLike]


def make_engine(options: "EngineOptions", metrics: EngineMetrics, mark: Callable[[str], None]) -> EngineLike:
    """The real engine. Imports torch, which is most of the time that a small model takes to start."""
    from headway_runtime import head_start

    entered_at = time.monotonic()
    head_start.begin(options)
    started = None
    if options.parallel.size > 1:
        from headway_runtime.parallel.agreement import agreed_words
        from headway_runtime.parallel.started import start_ranks

        level = logging.getLevelName(logging.getLogger().level).lower()
        started = start_ranks(
            options.parallel, options.num_threads, agreed_words(options), _end_with_rank, level
        )
    from headway_runtime.engine_config import resolve_engine_config

    config = resolve_engine_config(options)
    mark("torch")
    from headway_runtime.engine import EngineCore

    mark("engine imports")
    began_at = time.monotonic()
    engine = EngineCore(config, metrics, time.monotonic, started)
    metrics.model_loaded(time.monotonic() - began_at)
    mark("model")
    engine.start.add("imports", began_at - entered_at)
    metrics.started(engine.start.seconds)
    logger.info("%s", engine.start.told())
    return engine


def _end_with_rank(message: str, status: int) -> None:
    """End this process: whatever waits for a lost rank, a device even, may never come back."""
    if status in messages.EXIT_STATUSES_REFUSED:
        print(f"headway serve: {message}", file=sys.stderr, flush=True)
        os._exit(status)
    logger.error("%s", message)
    os._exit(1)


def run(launch: messages.Launch, make: MakeEngine = make_engine) -> int:
    """Start an engine and serve it; returns the process' exit status."""
    # A terminal's Ctrl-C goes to the whole group; when this process ends is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch_lifeline(launch.lifeline_fd, lambda: shutil.rmtree(launch.directory, ignore_errors=True))
    configure_logging(launch.log_level)
    # Importing torch makes 280,000 objects. Looking through them for garbage costs a sixth of the import,
    # and later, each time, some hundred milliseconds of a step: so it is put off, and then they are left out.
    gc.disable()
    timeline: dict[str, float] = {}

    def mark(stage: str) -> None:
        timeline[stage] = round(time.monotonic() - launch.started_at, 3)

    mark("engine process")
    socket = bind_socket(launch.address)
    metrics = EngineMetrics(launch.engine.targets)
    try:
        engine = make(launch.engine, metrics, mark)
    except ConfigError as error:
        print(f"headway serve: {error}", file=sys.stderr)
        return error.exit_status
    except HeadwayRuntimeError as error:
        print(f"headway serve: {error}", file=sys.stderr)
        return 1
    gc.freeze()
    gc.enable()
    loop = EngineLoop(engine, metrics, socket, timeline)
    # Not before: until then there is a folder to remove, which only the lifeline's end does.
    die_with_parent(launch.parent_pid)
    try:
        loop.run()
    except Exception:
        logger.exception("the engine cannot go on")
        return 1
    engine.close()
    return 0


def main(argv: list[str]) -> int:
    (text,) = argv
    return run(msgspec.json.decode(text, type=messages.Launch))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: tearing torch down takes a second and can only go wrong.
    os._exit(status)

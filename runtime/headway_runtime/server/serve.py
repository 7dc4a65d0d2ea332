"""`headway serve MODEL`: serve one model over OpenAI's API.

Reads the options, starts the engine process, then becomes the HTTP process, or the one that minds several.

The order is the point: the engine process, which has the most to import, starts before this process imports
anything that takes time.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Sequence

from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.lifeline import watch_lifeline
from headway_runtime.process_log import configure_logging
from headway_runtime.server.engine_handle import ENGINE_COMMAND, EngineHandle
from headway_runtime.server.options import ServeOptions, build_parser, resolve_options
from headway_runtime.sources.interrupts import InterruptedBySignal, raising_on_sigterm

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the server with the arguments after `headway serve`; returns the exit status."""
    started_at = time.monotonic()
    try:
        arguments = build_parser().parse_args(argv)
        configure_logging(arguments.log_level)
        with raising_on_sigterm():
            options = resolve_options(arguments, os.environ)
    except HeadwayRuntimeError as error:
        print(f"headway serve: {error}", file=sys.stderr)
        return error.exit_status
    except InterruptedBySignal as interrupt:
        print(f"headway serve: {interrupt}", file=sys.stderr)
        return interrupt.exit_status
    return serve(options, started_at)


def serve(options: ServeOptions, started_at: float, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until told to end. `engine_command` is what runs an engine process."""
    configure_logging(options.log_level)
    if taken := options.engine.defaults.unusual:
        listed = ", ".join(f"{name}={value!r}" for name, value in taken.items())
        logger.info("defaults from generation_config.json (--generation-config none is without): %s", listed)
    gc.disable()  # until the server listens: imports make objects, not garbage
    if options.engine.parallel.node_rank > 0:
        from headway_runtime.server import node_process

        return node_process.run(options)
    timeline = {"options": round(time.monotonic() - started_at, 3)}
    # Prompts are encoded in a few threads of our own; a pool behind each of them would fight the engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handle = EngineHandle(options, started_at, engine_command)
    if options.lifeline_fd is not None:
        watch_lifeline(options.lifeline_fd, handle.kill)
    timeline["engine started"] = round(time.monotonic() - started_at, 3)
    try:
        if options.http.api_server_count > 1:
            from headway_runtime.server.supervisor import Supervisor

            return Supervisor(options, handle, started_at).run()
        from headway_runtime.server import http_process

        return http_process.run(options, handle, timeline, started_at)
    except HeadwayRuntimeError as error:
        print(f"headway serve: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        handle.kill()

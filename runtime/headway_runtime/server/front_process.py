"""One of several HTTP processes of a server, started and told what to do by `supervisor`.

Everything comes through standard input: the launch as one line of JSON (API keys are in it, so it must not be
on a command line, which everyone may read), then commands, one a line. Its end means that the parent is gone,
and then this process ends at once, too. Signals are the parent's business: a terminal or a service manager
sends them to all processes of a group, which would count as two.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.lifeline import EXIT_STATUS_ORPHANED
from headway_runtime.process_log import configure_logging
from headway_runtime.server.messages import EXIT_STATUS_CONFIG
from headway_runtime.server.options import ServeOptions

DRAIN = b"drain"
ENGINE_ENDED = b"engine ended "


class FrontLaunch(msgspec.Struct, frozen=True):
    """What one HTTP process needs to know. front: its number. listener_fd: its listening socket.

    address: the engine's socket, in `directory`, which goes when all of the server is gone.
    """

    options: ServeOptions
    front: int
    listener_fd: int
    address: str
    directory: str
    started_at: float


class EngineLink:
    """The engine process as one sees it who did not start it: the parent tells what becomes of it."""

    def __init__(self, launch: FrontLaunch, commands: BinaryIO) -> None:
        self.address = launch.address
        self._directory = launch.directory
        self._commands = commands

    def watch(self, on_exit: Callable[[int], None], on_drain: Callable[[], None] | None = None) -> None:
        """Call these, from another thread, when the engine process has ended or the server is to drain."""

        def read() -> None:
            for line in self._commands:
                command = line.rstrip()
                if command.startswith(ENGINE_ENDED):
                    on_exit(int(command.removeprefix(ENGINE_ENDED)))
                elif command == DRAIN and on_drain is not None:
                    on_drain()
            shutil.rmtree(self._directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.write(2, f"process {os.getpid()} ends: its parent is gone\n".encode())
            os._exit(EXIT_STATUS_ORPHANED)

        threading.Thread(target=read, name="commands", daemon=True).start()

    def remove_directory(self) -> None:
        """Nothing: another HTTP process may have to connect yet."""

    def kill(self) -> None:
        """Nothing: the parent ends the engine process."""

    def close(self, timeout_seconds: float) -> None:
        """Nothing, likewise."""


def main() -> int:
    """Serve until told to end; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    began_at = time.monotonic()
    # Unbuffered, so that no command that follows is swallowed with the launch.
    commands = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - stays open for as long as this process lives
    line = commands.readline()
    if not line.endswith(b"\n"):
        return EXIT_STATUS_ORPHANED
    launch = msgspec.json.decode(line, type=FrontLaunch)
    configure_logging(launch.options.log_level)
    gc.disable()  # until the server listens: imports make objects, not garbage
    timeline = {"front process": round(began_at - launch.started_at, 3)}
    try:
        from headway_runtime.server import http_process

        return http_process.run_front(launch, EngineLink(launch, commands), timeline)
    except HeadwayRuntimeError as error:
        print(f"headway serve: {error}", file=sys.stderr)
        return EXIT_STATUS_CONFIG


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the thread that reads commands may be in the middle of a read.
    os._exit(status)

"""A server of several HTTP processes: starts them beside the engine process, and minds how each of them ends.

    an HTTP process dies       its streams break, the others go on; it is started again, on the socket that it
                               had, in which its connections wait meanwhile. Too often: the server ends with 1
    the engine process dies    every request fails at once, the server ends with 1
    SIGTERM, SIGINT            all HTTP processes drain; the server ends with 0 when the last one has
    a second signal            everything ends at once, with 1
    this process is killed     the others see the end of their pipe and end at once

One listening socket per HTTP process, all on one port: the kernel shares out connections. This process keeps
them open, imports nothing heavy and runs no event loop.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from socket import socket

import msgspec

from headway_runtime.server.engine_handle import EngineHandle
from headway_runtime.server.front_process import DRAIN, ENGINE_ENDED, FrontLaunch
from headway_runtime.server.listening import listen, write_port_file
from headway_runtime.server.messages import EXIT_STATUS_CONFIG, EXIT_STATUSES_REFUSED
from headway_runtime.server.options import ServeOptions

logger = logging.getLogger(__name__)

FRONT_COMMAND = (sys.executable, "-m", "headway_runtime.server.front_process")
# So many deaths of HTTP processes within so many seconds are a fault that starting again does not mend.
MOST_DEATHS = 5
DEATHS_SECONDS = 60.0
# How much longer than it was given an HTTP process may take to end.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class FrontEnded:
    number: int
    status: int


@dataclass(frozen=True, slots=True)
class EngineEnded:
    status: int


@dataclass(frozen=True, slots=True)
class Signalled:
    name: str


Event = FrontEnded | EngineEnded | Signalled


class Supervisor:
    """The HTTP processes of one server. Not thread-safe but for the queue of events."""

    def __init__(
        self,
        options: ServeOptions,
        handle: EngineHandle,
        started_at: float,
        command: Sequence[str] = FRONT_COMMAND,
    ) -> None:
        self._options = options
        self._handle = handle
        self._started_at = started_at
        self._command = command
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._listeners: list[socket] = []
        self._fronts: dict[int, subprocess.Popen[bytes]] = {}
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        # What the server will end with, once that is certain.
        self._status: int | None = None
        self._deadline: float | None = None

    def run(self) -> int:
        """Serve until the end; returns the exit status. ConfigError for a port that cannot be had."""
        options, number = self._options, self._options.http.api_server_count
        self._listeners = listen(options.host, options.port, number)
        port = self._listeners[0].getsockname()[1]
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda got, _: self._events.put(Signalled(signal.Signals(got).name)))
        self._handle.watch(lambda status: self._events.put(EngineEnded(status)))
        try:
            for front in range(number):
                self._start(front)
            if options.port_file is not None:
                write_port_file(Path(options.port_file), port)
            logger.info("listening on %s port %d with %d HTTP processes", options.host, port, number)
            while self._fronts:
                event = self._next_event()
                if event is None:
                    logger.warning("%d HTTP processes did not end in time", len(self._fronts))
                    return 1
                if not self._handle_event(event):
                    return 1
            assert self._status is not None, "the last HTTP process ends only when all do"
            return self._status
        finally:
            self.kill()

    def kill(self) -> None:
        """End every process at once."""
        for process in self._fronts.values():
            process.kill()
        self._handle.kill()

    def _next_event(self) -> Event | None:
        """The next one; None when the time that everything has to end is up."""
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            return self._events.get(timeout=timeout)
        except Empty:
            return None

    def _handle_event(self, event: Event) -> bool:
        """False: end everything at once."""
        match event:
            case Signalled() if self._status is None:
                seconds = self._options.drain_timeout_seconds
                logger.info("%s: draining, for at most %g s", event.name, seconds)
                self._end_with(0, DRAIN, seconds)
            case Signalled():
                logger.warning("%s again: ending at once", event.name)
                return False
            case EngineEnded():
                self._engine_ended(event.status)
            case FrontEnded():
                process = self._fronts.pop(event.number)
                assert process.stdin is not None
                process.stdin.close()
                self._front_ended(event)
        return True

    def _engine_ended(self, status: int) -> None:
        is_refusal = status in EXIT_STATUSES_REFUSED
        if not is_refusal:
            logger.error("the engine process ended with status %d; this server ends, too", status)
        self._end_with(status if is_refusal else 1, ENGINE_ENDED + b"%d" % status, 0.0)

    def _front_ended(self, event: FrontEnded) -> None:
        if self._status is not None:
            # As it was told to; or it fell over while it drained, and took requests with it.
            self._status = self._status or event.status
            return
        if event.status == EXIT_STATUS_CONFIG:  # it has said what is wrong, and so would its successor
            self._end_with(EXIT_STATUS_CONFIG, DRAIN, 0.0)
            return
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == MOST_DEATHS and now - self._deaths[0] < DEATHS_SECONDS:
            logger.error(
                "HTTP processes died %d times in %g s; this server ends", MOST_DEATHS, DEATHS_SECONDS
            )
            self._end_with(1, DRAIN, 0.0)
            return
        logger.error("HTTP process %d ended with status %d; it is started again", event.number, event.status)
        self._start(event.number)

    def _end_with(self, status: int, command: bytes, seconds: float) -> None:
        """Tell all HTTP processes to end, in that time."""
        if self._status is not None and self._status != 0:
            return
        self._status = status
        self._deadline = time.monotonic() + seconds + GRACE_SECONDS
        # An HTTP process that is done closes its socket, and nobody may be left waiting in it.
        for listener in self._listeners:
            listener.close()
        for process in self._fronts.values():
            self._tell(process, command)

    def _start(self, number: int) -> None:
        listener = self._listeners[number]
        launch = FrontLaunch(
            options=self._options,
            front=number,
            listener_fd=listener.fileno(),
            address=self._handle.address,
            directory=str(self._handle.directory),
            started_at=self._started_at,
        )
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),))
        self._fronts[number] = process
        self._tell(process, msgspec.json.encode(launch))

        def wait() -> None:
            self._events.put(FrontEnded(number, process.wait()))

        threading.Thread(target=wait, name=f"front-{number}-watch", daemon=True).start()

    def _tell(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which is the next event
            os.write(process.stdin.fileno(), line + b"\n")

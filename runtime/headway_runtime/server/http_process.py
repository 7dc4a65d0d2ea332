"""An HTTP process after its start: event loop, engine client, application, and how it all ends.

Imported only once the engine process is running, because importing this takes most of a second. Ends in one
of three ways: drained after SIGTERM (0), the engine process gone (1), or a second signal (1).
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import uvicorn
import uvloop

from headway_runtime.errors import EngineDeadError
from headway_runtime.server.app import build_app
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.engine_handle import EngineHandle
from headway_runtime.server.front_process import EngineLink, FrontLaunch
from headway_runtime.server.http_protocol import REQUESTS_PER_TURN, ServerProtocol
from headway_runtime.server.lifecycle import Lifecycle
from headway_runtime.server.listening import LISTEN_BACKLOG, allow_connections, doors, listen, write_port_file
from headway_runtime.server.messages import EXIT_STATUSES_REFUSED
from headway_runtime.server.options import ServeOptions
from headway_runtime.server.places import MOST_TURNED_AWAY, Places
from headway_runtime.server.serving import Serving
from headway_runtime.server.tls import tls_context
from headway_runtime.server.tls_refresh import keep_fresh
from headway_runtime.server.turnstile import Turnstile

logger = logging.getLogger(__name__)

# How long answers that only have to be written may still take, and how long the engine process may.
LAST_WRITES_SECONDS = 2.0
ENGINE_END_SECONDS = 5.0
# Rounds of the garbage collector between two that look through everything, ten times Python's own: through
# all that 256 streams hold they take 10 to 50 ms, and find nothing. What a request makes refers to itself
# nowhere and goes with it.
ROUNDS_OF_GARBAGE = 100
# How long an engine that is ready may take to say so to another HTTP process.
HELLO_SECONDS = 0.5


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: this module's decide when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EngineSide(Protocol):
    """What an HTTP process needs of the engine process besides its socket."""

    @property
    def address(self) -> str: ...
    def remove_directory(self) -> None: ...
    def kill(self) -> None: ...
    def close(self, timeout_seconds: float) -> None: ...


def run(options: ServeOptions, handle: EngineHandle, timeline: dict[str, float], started_at: float) -> int:
    """Be the only HTTP process until the end; returns the exit status.

    ConfigError for what only shows now (port, tokenizer).
    """
    (listener,) = listen(options.host, options.port)

    def watch(ending: "_Ending", loop: asyncio.AbstractEventLoop) -> None:
        handle.watch(lambda status: _call_soon(loop, ending.engine_exited, status))
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, ending.signalled, one)
        port = listener.getsockname()[1]
        if options.port_file is not None:
            write_port_file(Path(options.port_file), port)
        logger.info("listening on %s port %d; the engine is starting", options.host, port)

    return _run(_Front(options, handle, listener, watch, timeline, started_at))


def run_front(launch: FrontLaunch, link: EngineLink, timeline: dict[str, float]) -> int:
    """Be one of several HTTP processes; as `run`."""

    def watch(ending: "_Ending", loop: asyncio.AbstractEventLoop) -> None:
        link.watch(
            lambda status: _call_soon(loop, ending.engine_exited, status),
            lambda: _call_soon(loop, ending.drain),
        )

    listener = socket.socket(fileno=launch.listener_fd)
    return _run(
        _Front(launch.options, link, listener, watch, timeline, launch.started_at, launch.front, alone=False)
    )


@dataclass(frozen=True, slots=True)
class _Front:
    """One HTTP process' part in its server. watch: connects what may happen to it with how it ends."""

    options: ServeOptions
    engine: EngineSide
    listener: socket.socket
    watch: Callable[["_Ending", asyncio.AbstractEventLoop], None]
    timeline: dict[str, float]
    started_at: float
    number: int = 0
    alone: bool = True

    def mark(self, stage: str) -> None:
        self.timeline[stage] = round(time.monotonic() - self.started_at, 3)


def _run(front: _Front) -> int:
    front.mark("http imports")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(front))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to be told
        loop.call_soon_threadsafe(callback, *arguments)


async def _serve(front: _Front) -> int:
    options = front.options
    client = EngineClient(front.engine.address, front.number)
    lifecycle = Lifecycle(time.monotonic)
    serving = Serving(options, client, lifecycle)
    protocol = partial(
        ServerProtocol,
        options=options.http,
        places=_places(options.http.max_connections),
        turnstile=Turnstile(REQUESTS_PER_TURN),
        report_refused=client.report_refused,
    )
    tls = None if options.tls is None else tls_context(options.tls)
    server = _Server(
        uvicorn.Config(
            build_app(serving),
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=cast("int", options.http.keep_alive_seconds),  # any number will do
            timeout_graceful_shutdown=1,
            backlog=LISTEN_BACKLOG,
            ssl_context_factory=None if tls is None else (lambda *_: tls),
        )
    )
    ending = _Ending(front, client, lifecycle, server)
    front.watch(ending, asyncio.get_running_loop())
    # What the start has made stays; only what requests make is worth looking through for garbage.
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], ROUNDS_OF_GARBAGE)
    gc.enable()
    if not front.alone:
        # Connections may wait in the socket already, and the engine may long be ready: then its answer is
        # worth waiting for, as they would be turned away without it.
        await asyncio.wait([client.ready], timeout=HELLO_SECONDS)
    front.mark("listening")
    tasks = [
        asyncio.create_task(_announce(client, front)),
        asyncio.create_task(serving.watch.run()),
    ]
    if tls is not None and options.tls is not None and options.tls.refresh:
        tasks.append(asyncio.create_task(keep_fresh(tls, options.tls)))
    try:
        await server.serve(sockets=doors(front.listener))
    finally:
        for task in tasks:
            task.cancel()
        # Both take their time: one waits for a collector of traces, the other for the engine process.
        await asyncio.gather(asyncio.to_thread(serving.close), ending.finish())
    if ending.status == 0 and front.alone:
        # Else the cause stands last, where those look who show one line of a log.
        logger.info("ended")
    return ending.status


def _places(wanted: int) -> Places:
    """As many as the limit on open files allows, less some for those that are to be told there is none."""
    files = allow_connections(wanted + MOST_TURNED_AWAY)
    num_turned_away = min(MOST_TURNED_AWAY, max(files - wanted, files // 8, 1))
    granted = max(1, min(wanted, files - num_turned_away))
    if granted < wanted:
        logger.warning("the limit on open files allows %d connections; raise it for more", granted)
    return Places(granted, num_turned_away)


async def _announce(client: EngineClient, front: _Front) -> None:
    """Log once where the seconds of the start went; then nothing of the start is needed any more."""
    try:
        info = await asyncio.shield(client.ready)
        front.mark("ready")
        stages = {**front.timeline, **info.timeline}
        listed = ", ".join(
            f"{name} {at:.2f}" for name, at in sorted(stages.items(), key=lambda item: item[1])
        )
        if front.number == 0:
            logger.info("ready on %s; seconds since the start: %s", info.device, listed)
        await client.state()
    except (EngineDeadError, TimeoutError):
        return
    # An answer has come: the socket is connected, and a killed server leaves no file behind.
    front.engine.remove_directory()


class _Ending:
    """The ways in which the server ends, and the status that each leaves."""

    def __init__(self, front: _Front, client: EngineClient, lifecycle: Lifecycle, server: _Server) -> None:
        self._front = front
        self._client = client
        self._lifecycle = lifecycle
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self.status = 0

    def signalled(self, number: signal.Signals) -> None:
        """The first signal drains; the second one ends everything at once."""
        if self._task is None:
            seconds = self._front.options.drain_timeout_seconds
            logger.info("%s: draining, for at most %g s", number.name, seconds)
            self.drain()
            return
        logger.warning("%s again: ending at once", number.name)
        self._front.engine.kill()
        sys.stderr.flush()
        os._exit(1)

    def drain(self) -> None:
        """Serve what there is, then end."""
        if self._task is None:
            self._task = asyncio.create_task(self._drain())

    def engine_exited(self, status: int) -> None:
        """The engine process is gone: answer what is open with an error, then end."""
        if self._server.should_exit:
            return  # as it was told to
        is_refusal = status in EXIT_STATUSES_REFUSED
        if self._front.alone and (not is_refusal or self._client.is_ready):
            logger.error("the engine process ended with status %d; this server ends, too", status)
        self.status = status if is_refusal else 1
        self._client.engine_ended(f"the engine process ended with status {status}; send the request again")
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._stop_serving())

    async def _drain(self) -> None:
        if not await self._lifecycle.drain(self._front.options.drain_timeout_seconds):
            logger.warning("%d requests did not end in time", self._lifecycle.num_in_flight)
            self._client.end_all("the server is shutting down; send the request again")
        await self._stop_serving()

    async def _stop_serving(self) -> None:
        await self._lifecycle.wait_until_idle(LAST_WRITES_SECONDS)
        self._server.should_exit = True

    async def finish(self) -> None:
        """End the engine process, if it is this one's, and remove what the server made."""
        self._server.should_exit = True
        is_ready = self._client.is_ready
        self._client.shut_down(end_engine=self._front.alone)
        if not is_ready:
            self._front.engine.kill()
        await asyncio.to_thread(self._front.engine.close, ENGINE_END_SECONDS)

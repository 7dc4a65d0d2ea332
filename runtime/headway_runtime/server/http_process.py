"""The HTTP process after its start: event loop, engine client, application, and how it all ends.

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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
import uvloop

from headway_runtime.errors import ConfigError, EngineDeadError
from headway_runtime.server.app import build_app
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.engine_handle import EngineHandle
from headway_runtime.server.http_protocol import Protocol
from headway_runtime.server.lifecycle import Lifecycle
from headway_runtime.server.messages import EXIT_STATUS_CONFIG
from headway_runtime.server.options import ServeOptions
from headway_runtime.server.serving import Serving

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
# How long answers that only have to be written may still take, and how long the engine process may.
LAST_WRITES_SECONDS = 2.0
ENGINE_END_SECONDS = 5.0


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: this module's decide when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(options: ServeOptions, handle: EngineHandle, timeline: dict[str, float], started_at: float) -> int:
    """Serve until the end; returns the exit status. ConfigError for what only shows now (port, tokenizer)."""
    timeline["http imports"] = round(time.monotonic() - started_at, 3)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options, handle, timeline, started_at))


async def _serve(
    options: ServeOptions, handle: EngineHandle, timeline: dict[str, float], started_at: float
) -> int:
    loop = asyncio.get_running_loop()
    client = EngineClient(handle.address)
    lifecycle = Lifecycle(time.monotonic)
    listener = _listen(options.host, options.port)
    serving = Serving(options, client, lifecycle)
    server = _Server(
        uvicorn.Config(
            build_app(serving),
            http=cast("type[asyncio.Protocol]", partial(Protocol, options=options.http)),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=cast("int", options.http.keep_alive_seconds),  # any number will do
            timeout_graceful_shutdown=1,
            backlog=LISTEN_BACKLOG,
        )
    )
    ending = _Ending(options, handle, client, lifecycle, server)

    def exited(status: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to be told
            loop.call_soon_threadsafe(ending.engine_exited, status)

    handle.watch(exited)
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, ending.signalled, one)
    port = listener.getsockname()[1]
    if options.port_file is not None:
        write_port_file(Path(options.port_file), port)
    # What the start has made stays; only what requests make is worth looking through for garbage.
    gc.freeze()
    gc.enable()
    timeline["listening"] = round(time.monotonic() - started_at, 3)
    logger.info("listening on %s port %d; the engine is starting", options.host, port)
    announcing = asyncio.create_task(_announce(client, handle, timeline, started_at))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        serving.close()
        await ending.finish()
    return ending.status


async def _announce(
    client: EngineClient, handle: EngineHandle, timeline: dict[str, float], started_at: float
) -> None:
    """Log once where the seconds of the start went; then nothing of the start is needed any more."""
    try:
        info = await asyncio.shield(client.ready)
        stages = {**timeline, **info.timeline, "ready": round(time.monotonic() - started_at, 3)}
        listed = ", ".join(
            f"{name} {at:.2f}" for name, at in sorted(stages.items(), key=lambda item: item[1])
        )
        logger.info("ready on %s; seconds since the start: %s", info.device, listed)
        await client.state()
    except (EngineDeadError, TimeoutError):
        return
    # An answer has come: both sockets are connected, and a killed server leaves no file behind.
    handle.remove_directory()


class _Ending:
    """The ways in which the server ends, and the status that each leaves."""

    def __init__(
        self,
        options: ServeOptions,
        handle: EngineHandle,
        client: EngineClient,
        lifecycle: Lifecycle,
        server: _Server,
    ) -> None:
        self._options = options
        self._handle = handle
        self._client = client
        self._lifecycle = lifecycle
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self.status = 0

    def signalled(self, number: signal.Signals) -> None:
        """The first signal drains; the second one ends everything at once."""
        if self._task is None:
            logger.info("%s: draining, for at most %g s", number.name, self._options.drain_timeout_seconds)
            self._task = asyncio.create_task(self._drain())
            return
        logger.warning("%s again: ending at once", number.name)
        self._handle.kill()
        sys.stderr.flush()
        os._exit(1)

    def engine_exited(self, status: int) -> None:
        """The engine process is gone: answer what is open with an error, then end."""
        if self._server.should_exit:
            return  # as it was told to
        if status != EXIT_STATUS_CONFIG or self._client.is_ready:
            logger.error("the engine process ended with status %d; this server ends, too", status)
        self.status = EXIT_STATUS_CONFIG if status == EXIT_STATUS_CONFIG else 1
        self._client.engine_ended(f"the engine process ended with status {status}; send the request again")
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._stop_serving())

    async def _drain(self) -> None:
        if not await self._lifecycle.drain(self._options.drain_timeout_seconds):
            logger.warning("%d requests did not end in time", self._lifecycle.num_in_flight)
            self._client.end_all("the server is shutting down; send the request again")
        await self._stop_serving()

    async def _stop_serving(self) -> None:
        await self._lifecycle.wait_until_idle(LAST_WRITES_SECONDS)
        self._server.should_exit = True

    async def finish(self) -> None:
        """End the engine process and remove what the server made."""
        self._server.should_exit = True
        is_ready = self._client.is_ready
        self._client.shut_down(end_engine=True)
        if not is_ready:
            self._handle.kill()
        await asyncio.to_thread(self._handle.close, ENGINE_END_SECONDS)
        if self.status == 0:  # else the cause stands last, where those look who show one line of a log
            logger.info("ended")


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host={host!r}: {error}; give an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host={host!r} --port={port}: cannot listen there ({error}); choose another, or --port 0"
        ) from error
    listener.setblocking(False)
    return listener


def write_port_file(path: Path, port: int) -> None:
    """Write the number so that no reader ever sees half of it. ConfigError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{port}\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--port-file={str(path)!r}: cannot be written ({error}); give another path"
        ) from error

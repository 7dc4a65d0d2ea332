"""The process around the application: listening, signals, draining, the port file and the lifeline.

Draining, from the first SIGTERM or SIGINT: `/ready` fails at once; requests that still come are served, with
`Connection: close`, or answered 503 where no replica is ready; the end comes when nothing is in flight and
one second has passed without a request (at once, if none ever came), or after the drain timeout, when the
rest is ended with an error. A second signal ends all at once.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from headway_gateway.application import Application
from headway_gateway.backend_lists import follow
from headway_gateway.config import GatewayConfig
from headway_gateway.errors import ConfigError
from headway_gateway.http_server import KEEP_ALIVE_SECONDS, LONGEST_HEADER_BYTES, MOST_HEADERS, Server
from headway_gateway.proxy import Proxy

QUIET_SECONDS = 1.0
LOOK_SECONDS = 0.02
LAST_WORDS_SECONDS = 2.0  # for error events to be written when the drain timeout has passed
BACKLOG = 4096
EVERY_ADDRESS = "::"
# What must have been made beyond what has gone before the collector looks through it; how often, before it
# looks through what outlived that, too; and how often that, before all. A request's own objects go with it.
COLLECTOR_THRESHOLDS = (5_000, 5, 5)
log = logging.getLogger(__name__)


async def serve(config: GatewayConfig, version: str) -> int:
    """Run the gateway until it is told to end; the exit status.

    Raises ConfigError where a flag is wrong, BackendListError where not even a first list can be followed.
    """
    watch_lifeline(config.lifeline_fd)
    application = Application(config, version, open_files=raise_open_files())
    signals = _Signals()
    runner = web.ServerRunner(make_server(application), shutdown_timeout=LAST_WORDS_SECONDS)
    try:
        source = asyncio.create_task(follow(config, application), name="backends")
        listeners = listen(config.host, config.port)
        await runner.setup()
        for listener in listeners:
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
        port = listeners[0].getsockname()[1]
        if config.port_file is not None:
            write_port_file(config.port_file, port)
        shown = " and ".join(listener.getsockname()[0] for listener in listeners)
        log.info("listening on %s port %d", shown, port)
        collect_less()
        first = asyncio.create_task(signals.first.wait())
        done, _ = await asyncio.wait((first, source), return_when=asyncio.FIRST_COMPLETED)
        if source in done:
            first.cancel()
            source.result()  # raises: only an error before the first list ends it
        await drain(application.proxy, config.drain_timeout_seconds, signals.second)
        source.cancel()
        return 0
    finally:
        await runner.cleanup()
        await application.close()


def make_server(application: Application) -> web.Server:
    """The HTTP server: bodies untouched, handlers cancelled as soon as their client has gone."""
    return Server(
        application.handle,
        application.connections,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        max_line_size=LONGEST_HEADER_BYTES,
        max_field_size=LONGEST_HEADER_BYTES,
        max_headers=MOST_HEADERS,
        keepalive_timeout=KEEP_ALIVE_SECONDS,
    )


async def drain(proxy: Proxy, timeout_seconds: float, cut_short: asyncio.Event) -> None:
    """Serve what is still there and still coming, then return."""
    proxy.is_draining = True
    started_at = asyncio.get_running_loop().time()
    log.info("draining: %d requests in hand", proxy.num_exchanges)

    def is_quiet() -> bool:
        if proxy.num_exchanges:
            return False
        last = proxy.last_request_at
        return last is None or asyncio.get_running_loop().time() - max(started_at, last) >= QUIET_SECONDS

    if await _until(is_quiet, timeout_seconds, cut_short):
        log.info("drained")
        return
    log.warning("ending %d requests that are still in hand", proxy.num_exchanges)
    proxy.end_all()
    await _until(lambda: proxy.num_exchanges == 0, LAST_WORDS_SECONDS, cut_short)


async def _until(is_reached: Callable[[], bool], timeout_seconds: float, cut_short: asyncio.Event) -> bool:
    """Look until `is_reached`, the time is up, or `cut_short` is set; whether it was reached."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while not is_reached() and not cut_short.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await cut_short.wait()
    return is_reached()


def collect_less() -> None:
    """Keep Python's collector from what the start has made, which stays, and from what is soon gone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def raise_open_files() -> int | None:
    """As many as the system lets this process have, because every request takes two; None for any number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int) -> list[socket.socket]:
    """The listening sockets: one, or for "::" one for each kind of address that this system has.

    Two, and none that takes both: so no client's address is told as "::ffff:10.0.0.1".
    """
    plain = host.removeprefix("[").removesuffix("]")
    if plain != EVERY_ADDRESS:
        return [_listen(plain, port)]
    try:
        first = _listen("0.0.0.0", port)
    except ConfigError as error:
        if not _is_unknown(error.__cause__):
            raise
        return [_listen(plain, port)]
    try:
        return [first, _listen(plain, first.getsockname()[1])]
    except ConfigError as error:
        if _is_unknown(error.__cause__):
            return [first]
        first.close()
        raise


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"cannot listen on --host={host!r} --port={port}: {error}; choose another"
        raise ConfigError(message) from error


def _is_unknown(error: BaseException | None) -> bool:
    """Whether this system has no addresses of the kind."""
    return isinstance(error, OSError) and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def write_port_file(path: Path, port: int) -> None:
    """The port number, in a file that is whole whenever it is there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)


def watch_lifeline(file_descriptor: int | None) -> None:
    """Exit at once when the other end of this pipe is closed, which the system does when the parent dies."""
    if file_descriptor is None:
        return

    def read() -> None:
        try:
            is_parent_alive = bool(os.read(file_descriptor, 4096))
        except BlockingIOError:
            return
        except OSError:
            is_parent_alive = False
        if not is_parent_alive:
            os._exit(1)

    try:
        os.set_blocking(file_descriptor, False)
        asyncio.get_running_loop().add_reader(file_descriptor, read)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lifeline-fd={file_descriptor} is not an open pipe: {error}") from None


class _Signals:
    """The first and the second wish to end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

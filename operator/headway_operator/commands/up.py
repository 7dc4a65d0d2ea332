"""`headway up -f service.yaml`: serve a manifest on this machine, by the same controller as on a cluster."""

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from headway.argument_types import integer, positive
from headway.command_parser import CommandParser
from headway.needs import missing_modules, told
from headway_operator.cluster.local_workspace import write_atomically
from headway_operator.commands.up_view import decided, decision, fetching, line, serves_otherwise, table
from headway_operator.errors import HeadwayOperatorError
from headway_operator.local_service import (
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_PORT,
    LocalService,
    running_service,
)

NUMBERS = re.compile(r"[0-9.]+")
FETCH_SECONDS = 30.0  # between two lines that differ in numbers alone
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """Serve until stopped: 0 then; 1 when manifest or port cannot be used, 2 where modules are missing."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.status_file is not None and not options.status_file.parent.is_dir():
        parser.error(f"--status-file: there is no folder {str(options.status_file.parent)!r}")
    if missing := sorted({*missing_modules("serve"), *missing_modules("gateway")}):
        needs = told(missing, "operator,gateway,runtime")
        print(f"headway up: its replicas and its gateway run on this machine, which {needs}", file=sys.stderr)
        return 2
    console = Console()
    has_table = console.is_terminal and not options.no_table
    handler: logging.Handler = RichHandler(console=console) if has_table else logging.StreamHandler()
    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[handler])
    try:
        return asyncio.run(up(options, console, has_table=has_table))
    except HeadwayOperatorError as error:
        print(f"headway up: {error}", file=sys.stderr)
        return 1


async def up(options: argparse.Namespace, console: Console, *, has_table: bool) -> int:
    """Serve until a signal comes; a second one stops at once."""
    view = _View(console, options.status_file, has_table=has_table)
    async with _signalled() as stops:
        async with running_service(
            options.file,
            port=options.port,
            interval_seconds=options.interval_seconds,
            on_change=view.changed,
        ) as service:
            showing = asyncio.create_task(view.show(service))
            stopping = asyncio.create_task(stops.get())
            await asyncio.wait({showing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                showing.result()  # it ends by itself only by failing
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            view.say("stopping: requests in hand are finished first; once more Ctrl-C stops at once")
            closing = asyncio.create_task(service.cluster.close())
            again = asyncio.create_task(stops.get())
            await asyncio.wait({closing, again}, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                await service.cluster.close(at_once=True)
            again.cancel()
            await closing
    view.say("stopped")
    if service.cluster.has_failed:
        view.say(f"not everything went well, so the logs are kept: {service.cluster.workspace.logs}")
    return 0


class _View:
    """Shows a service as it changes: live in a terminal, else a line per change."""

    def __init__(self, console: Console, status_file: Path | None, *, has_table: bool) -> None:
        self._console = console
        self._status_file = status_file
        self._has_table = has_table
        self._changed = asyncio.Event()
        self._said: dict[str, object] = {}
        self._num_edits = 0
        self._failures: dict[str, tuple[int, str]] = {}
        self._fetches: dict[str, tuple[float, str]] = {}

    def changed(self) -> None:
        """Something may have to be shown anew."""
        self._changed.set()

    def say(self, text: str) -> None:
        """One line with the time."""
        self._console.print(
            f"{datetime.now().astimezone():%H:%M:%S} {text}", markup=False, highlight=False, soft_wrap=True
        )

    async def show(self, service: LocalService) -> None:
        """Follow the service until cancelled."""
        self.say(f"{service.key}: serving at {service.url} as soon as a replica is ready")
        self.say(f"logs: {service.cluster.workspace.logs}")
        if service.warning:
            self.say(service.warning)
        if not self._has_table:
            await self._follow(service, lambda: None)
            return
        with Live(table(service), console=self._console, auto_refresh=False) as live:
            await self._follow(service, lambda: live.update(table(service), refresh=True))

    async def _follow(self, service: LocalService, draw: Callable[[], None]) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._status_file is not None and service.status:
                write_atomically(self._status_file, json.dumps(service.status).encode())
            for edit in service.edits[self._num_edits :]:
                self.say(edit)
            self._num_edits = len(service.edits)
            self._say_failures(service)
            if not self._has_table:
                self._say_fetches(service)
            if self._has_table:
                draw()
            else:
                state, message = line(service), decision(service.status)
                self._say_once("state", state, state)
                self._say_once("decision", message, decided(service.status))

    def _say_once(self, what: str, text: str, fact: object) -> None:
        """Say `text` when `fact`, which it tells, is a new one: numbers in it may move all the time."""
        if text and self._said.get(what) != fact:
            self._said[what] = fact
            self.say(text)

    def _say_failures(self, service: LocalService) -> None:
        for process in service.cluster.processes:
            replica = process.snapshot()
            num_failures, said = self._failures.get(process.name, (0, ""))
            if replica.phase != "failed" or num_failures > replica.num_restarts:
                continue
            self._failures[process.name] = (replica.num_restarts + 1, replica.message)
            if replica.message == said:
                self.say(f"{process.name}: {replica.reason} again, start {replica.num_restarts + 1}")
            else:
                self.say(f"{process.name}: {replica.reason}: {replica.message}")
                if serves_otherwise(service, replica):
                    self.say(
                        "the replicas of the manifest before still serve; edit it once more to mend this"
                    )
                self.say(f"the last lines of {process.log_path}:\n{process.tail()}")

    def _say_fetches(self, service: LocalService) -> None:
        """How far models are, as replicas tell it: at once where it is something new, else now and then."""
        now = asyncio.get_running_loop().time()
        for process in service.cluster.processes:
            words = fetching(process.snapshot())
            kind = NUMBERS.sub("", words)
            said_at, said = self._fetches.get(process.name, (0.0, ""))
            if words and (kind != said or now - said_at >= FETCH_SECONDS):
                self._fetches[process.name] = (now, kind)
                self.say(f"{process.name}: {words}")


@contextlib.asynccontextmanager
async def _signalled() -> AsyncIterator[asyncio.Queue[int]]:
    """A queue of the signals that ask to stop."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[int]()
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
    for number in heeded:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)


def _parser() -> CommandParser:
    parser = CommandParser(prog="headway up", description=__doc__)
    add = parser.add_argument
    add(
        "-f",
        "--file",
        type=Path,
        required=True,
        help="manifest of one InferenceService; Secrets and ConfigMaps if any",
    )
    add(
        "--port",
        type=integer(0, 65535),
        default=DEFAULT_PORT,
        help="on 127.0.0.1, for clients; 0: a free one",
    )
    add("--interval-seconds", type=positive, default=DEFAULT_INTERVAL_SECONDS, help="time between two passes")
    add("--no-table", action="store_true", help="lines instead of a live table")
    add("--status-file", type=Path, help="write the status there as JSON after every pass")
    return parser

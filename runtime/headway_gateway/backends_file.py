"""The local world's list of backends: one JSON file that its owner replaces atomically.

    {"version": 1, "backends": [{"id": "demo-0", "url": "http://127.0.0.1:41234", "state": "ready"}],
     "waiting_for": ""}

`waiting_for`, which may be missing, is what a replica that is not there yet does: clients that wait in vain
read it.
The file is looked at every 100 ms and read when its inode, size or modification time has changed. A table
that cannot be read or understood changes nothing: the last good one stays, and the log says why once.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway_gateway.backend import BackendEntry
from headway_gateway.errors import BackendListError

POLL_SECONDS = 0.1
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Table:
    """What one version of the file says."""

    entries: list[BackendEntry]
    waiting_for: str = ""


class BackendsFile:
    """Watches one table and hands every good version of it to `on_list`, every bad one to `on_error`.

    `on_seen` is called at each look that finds the last good version still there.
    """

    def __init__(
        self,
        path: Path,
        on_list: Callable[[Sequence[BackendEntry], str], None],
        on_error: Callable[[], None],
        on_seen: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._on_list = on_list
        self._on_error = on_error
        self._on_seen = on_seen
        self._is_good = False
        self._seen: tuple[int, int, int] | str | None = None

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self.look()
            await asyncio.sleep(POLL_SECONDS)

    def look(self) -> None:
        """Read the table if it is another one than the last time."""
        try:
            status = self._path.stat()
            signature: tuple[int, int, int] | str = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError as error:
            signature = f"{type(error).__name__}: {error}"
        if signature == self._seen:
            if self._is_good:
                self._on_seen()
            return
        self._seen, self._is_good = signature, False
        try:
            if isinstance(signature, str):
                raise BackendListError(f"--backends-file {str(self._path)!r} cannot be read: {signature}")
            table = parse_table(self._path.read_bytes())
        except (OSError, BackendListError) as error:
            self._on_error()
            log.warning("kept the last good list of backends: %s", error)
            return
        self._on_list(table.entries, table.waiting_for)
        self._is_good = True
        self._on_seen()


def parse_table(content: bytes) -> Table:
    """Raises BackendListError naming the place that is wrong."""
    try:
        table = json.loads(content)
    except ValueError as error:
        raise BackendListError(f"the table of backends is not JSON: {error}") from None
    if not isinstance(table, dict) or table.get("version") != 1:
        version = table.get("version") if isinstance(table, dict) else table
        raise BackendListError(f"the table's version={version!r} is not 1; write the table for this gateway")
    rows = table.get("backends")
    if not isinstance(rows, list):
        raise BackendListError(f"the table's backends={rows!r} is not a list")
    entries = [_parse_row(index, row) for index, row in enumerate(rows)]
    if len({entry.id for entry in entries}) != len(entries):
        raise BackendListError("the table names an id twice; each backend needs its own")
    waiting_for = table.get("waiting_for", "")
    if not isinstance(waiting_for, str):
        raise BackendListError(f"the table's waiting_for={waiting_for!r} is not a text")
    return Table(entries, waiting_for)


def _parse_row(index: int, row: Any) -> BackendEntry:
    where = f"backends[{index}]"
    if not isinstance(row, dict):
        raise BackendListError(f"{where}={row!r} is not an object")
    name, url, state = row.get("id"), row.get("url"), row.get("state")
    if not isinstance(name, str) or not name:
        raise BackendListError(f"{where}.id={name!r} is not a name")
    if state not in ("ready", "draining"):
        raise BackendListError(f'{where}.state={state!r} is neither "ready" nor "draining"')
    return BackendEntry(id=name, url=_check_url(where, url), state=state)


def _check_url(where: str, url: Any) -> str:
    remedy = "write http://HOST:PORT"
    if not isinstance(url, str):
        raise BackendListError(f"{where}.url={url!r} is not a URL; {remedy}")
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise BackendListError(f"{where}.url={url!r} is not the root of an HTTP server; {remedy}")
    return url.rstrip("/")

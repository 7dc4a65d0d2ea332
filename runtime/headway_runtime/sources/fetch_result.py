"""What `headway fetch` leaves for who supervises it: its end in a file, how far it is on standard error.

Both are JSON, of version 1. The file fits a container's termination message, of which Kubernetes keeps 4,096
bytes; the lines are read from the end of the container's log.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headway_runtime.errors import HeadwayRuntimeError

SCHEMA_VERSION = 1
MAX_MESSAGE_CHARACTERS = 1500


def write_fetched(path: Path, folder: Path) -> None:
    """In place: the path may be a mount, which no other file can be renamed to."""
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    _write(path, folder=str(folder), identity=folder.name, bytes=sum(sizes), files=len(sizes))


def write_error(path: Path, error: HeadwayRuntimeError) -> None:
    """error: the name of its class, by which it is told apart."""
    _write(path, error=type(error).__name__, message=str(error)[:MAX_MESSAGE_CHARACTERS])


def _write(path: Path, **facts: str | int) -> None:
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **facts}))


class ProgressLines:
    """Writes a line at most every so many seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._told_at = float("-inf")

    def told(self, there: int, wanted: int) -> None:
        """Bytes that are there, and all that are known to be wanted."""
        if (now := self._clock()) - self._told_at >= self._seconds:
            self._told_at = now
            print(json.dumps({"bytes": there, "total_bytes": wanted}), file=sys.stderr, flush=True)

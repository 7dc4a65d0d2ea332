"""The process that fetches: asks the source, writes the cache, tells its parent, ends.

A process of its own, so that nothing that it imports stays in the one that serves, and that it can be ended
at any instant: what is on disk then is what the next one goes on from. Started as `python -m
headway_runtime.sources.fetch_process` with the task as JSON in one argument. It speaks in lines of JSON on
standard output; when its standard input or the lifeline ends, so does it, at once.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway_runtime.adapters.peft_config import read_peft_config
from headway_runtime.errors import HeadwayRuntimeError, ModelFetchError
from headway_runtime.model_config import read_model_config
from headway_runtime.quantization.choice import read_quantization
from headway_runtime.sources.adopt import offline
from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_task import Task, decoded
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import BucketModel, HubModel, RemoteModel, parse
from headway_runtime.sources.remote import Remote
from headway_runtime.sources.wanted import ADAPTER, MODEL

logger = logging.getLogger("headway_runtime.sources.fetch_process")  # not __main__, which it is run as

EXIT_STATUS_ORPHANED = 1
TELL_SECONDS = 0.1


class Teller(logging.Handler):
    """Writes what happens as lines of JSON. Bytes that arrive are gathered for a while."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.INFO)
        self._descriptor = descriptor
        self._writing = threading.Lock()
        self._gathered = 0
        self._told_at = 0.0

    def tell(self, **event: Any) -> None:
        with self._writing:
            self._flush()
            self._write(event)

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(event="log", level=record.levelno, text=record.getMessage())

    def there(self, num_bytes: int) -> None:
        if num_bytes:
            self.tell(event="there", bytes=num_bytes)

    def expect(self, num_bytes: int, num_files: int) -> None:
        self.tell(event="expect", bytes=num_bytes, files=num_files)

    def arrived(self, num_bytes: int) -> None:
        with self._writing:
            self._gathered += num_bytes
            if time.monotonic() - self._told_at >= TELL_SECONDS:
                self._flush()

    def file_done(self) -> None:
        self.tell(event="file")

    def _flush(self) -> None:
        if self._gathered:
            self._write({"event": "bytes", "bytes": self._gathered})
        self._gathered, self._told_at = 0, time.monotonic()

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


def remote_of(model: RemoteModel) -> Remote:
    """Who can be asked for `model`. Imports the library of that kind alone."""
    if isinstance(model, HubModel):
        from headway_runtime.sources.hub import Hub

        return Hub(model)
    if isinstance(model, BucketModel):
        from headway_runtime.sources.bucket import Bucket

        return Bucket(model)
    from headway_runtime.sources.registry import Registry

    return Registry(model)


def run(task: Task, teller: Teller) -> Path:
    """Fetch, or find what is cached. Raises HeadwayRuntimeError."""
    model = parse(task.source, task.revision)
    assert isinstance(model, RemoteModel), "the parent resolves the others itself"
    kind = ADAPTER if task.is_adapter else MODEL
    check = check_adapter_config if task.is_adapter else check_config
    store = store_of(model, task.download_dir, os.environ, kind)
    if task.is_offline:
        return offline(model, store, teller, kind)
    with contextlib.closing(remote_of(model)) as remote:
        return fetch(model, remote, store, Patience(), teller, check, kind, headers_only=task.headers_only)


def check_config(folder: Path) -> None:
    """Refuse a model or quantization that this engine lacks, while only the small files have been fetched."""
    read_model_config(folder)
    read_quantization(folder)


def check_adapter_config(folder: Path) -> None:
    """Refuse an adapter that this engine cannot have, likewise."""
    read_peft_config(folder)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status; the last line on standard output is the result or the error."""
    task = decoded(arguments[0])
    for descriptor in (0, task.lifeline_fd):
        if descriptor is not None:
            threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    # Nothing else may write between the lines.
    output = os.dup(1)
    os.dup2(2, 1)
    teller = Teller(output)
    logging.getLogger("headway_runtime").addHandler(teller)
    logging.getLogger("headway_runtime").setLevel(logging.INFO)
    try:
        folder = run(task, teller)
    except HeadwayRuntimeError as error:
        teller.tell(event="error", kind=type(error).__name__, text=str(error))
        return 2
    except OSError as error:
        failure = ModelFetchError(f"{task.source}: {error}")
        teller.tell(event="error", kind=type(failure).__name__, text=str(failure))
        return 2
    except Exception as error:  # noqa: BLE001 - else the parent would have to guess why this process ended
        logger.error("%s: %s", task.source, traceback.format_exc())
        failure = ModelFetchError(
            f"{task.source}: the process that fetches it met {type(error).__name__} ({error}), which is a "
            "defect of Headway: report it with the traceback in the log above; what has come is kept"
        )
        teller.tell(event="error", kind=type(failure).__name__, text=str(failure))
        return 2
    teller.tell(event="result", folder=str(folder))
    return 0


def _end_with(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    os._exit(EXIT_STATUS_ORPHANED)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Not sys.exit: a thread may still wait for a connection that nobody needs any more.
    os._exit(status)

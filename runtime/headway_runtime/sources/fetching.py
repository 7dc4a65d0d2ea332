"""Has a remote model fetched by a process of its own, and shows how far it has come.

The caller imports nothing that it does not need: the fetching process has the libraries. It ends with the
caller, however that ends, and at once; what it has brought by then is kept, and gone on from the next time.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway_runtime.errors import (
    ConfigError,
    HeadwayRuntimeError,
    ModelFetchError,
    ModelLoadError,
    NoRoomError,
    SourceRefusedError,
)
from headway_runtime.load_progress import LoadProgress, Words
from headway_runtime.sources.fetch_task import Task, encoded

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "headway_runtime.sources.fetch_process")
ERRORS: dict[str, type[HeadwayRuntimeError]] = {
    one.__name__: one
    for one in (ConfigError, ModelFetchError, ModelLoadError, NoRoomError, SourceRefusedError)
}
# Hears of the bytes that are there, and of all that are known to be wanted.
OnProgress = Callable[[int, int], None]


def fetch_apart(task: Task, on_progress: OnProgress = lambda there, wanted: None) -> Path:
    """The folder of the model.

    Raises what the fetching process met, and ModelFetchError if it ended without.
    """
    if task.lifeline_fd is not None:
        # Whoever supervises this process reads its log, and the first bytes may be long in coming.
        logger.info("fetching %s: asking what it has", task.source)
    lifeline = () if task.lifeline_fd is None else (task.lifeline_fd,)
    process = subprocess.Popen(
        [*COMMAND, encoded(task)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=lifeline
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            folder = _hear(process.stdout, task.source, on_progress)
        except BaseException:
            # Also at a signal: nobody waits for it any longer.
            process.kill()
            raise
        finally:
            status = process.wait()
    if folder is not None:
        return folder
    ended = (
        f"was ended by signal {-status} (where memory runs out the system sends 9)"
        if status < 0
        else f"ended with status {status} and did not say why; look at what it wrote to standard error"
    )
    raise ModelFetchError(
        f"model source {task.source!r}: the process that fetches it {ended}. What has come is kept: start "
        "again to go on"
    )


def _hear(lines: Iterable[bytes], source: str, on_progress: OnProgress) -> Path | None:
    """The folder; None if they end before it is told. Raises the error that is told."""
    progress: LoadProgress | None = None
    there = wanted = 0
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        if event["event"] in ("there", "expect", "bytes"):
            there += 0 if event["event"] == "expect" else event["bytes"]
            wanted += 0 if event["event"] == "bytes" else event["bytes"]
            on_progress(there, wanted)
        match event["event"]:
            case "log":
                logger.log(event["level"], "%s", event["text"])
            case "expect" if progress is None:
                progress = LoadProgress(event["bytes"], event["files"], words=_words(source))
            case "expect" if progress is not None:
                progress.expect_more(event["bytes"], event["files"])
            case "bytes" if progress is not None:
                progress.tensor_read(event["bytes"])
            case "file" if progress is not None:
                progress.file_read()
            case "result":
                if progress is not None:
                    progress.close()
                return Path(event["folder"])
            case "error":
                raise ERRORS[event["kind"]](event["text"])
    return None


def _words(source: str) -> Words:
    return Words(
        bar="Fetching",
        under_way=f"fetching {source}",
        done=f"fetched %.3f GB of {source.replace('%', '%%')} in %d file%s in %.2f s",
    )

"""A process that reads large bodies: parses, checks and tokenizes them where no stream waits for it.

Parsing megabytes of JSON keeps the interpreter's lock for up to a second, whichever thread does it. So bodies
above a size come here (see `reading_pool`), and what goes back is what the engine is to be asked.

Standard input brings the launch, then jobs; standard output takes an answer to each: pickles, each behind its
length. They go between processes of one server alone. Ends when its input does.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.lifeline import die_with_parent
from headway_runtime.server.desk import load_model_files, name_of, served_model, with_adapter
from headway_runtime.server.options import ServeOptions
from headway_runtime.server.prompts import ServedModel

# Below the HTTP process: streams wait for that one.
NICENESS = 5
LENGTH_BYTES = 8
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadingLaunch:
    """What the process needs to know."""

    options: ServeOptions
    max_model_len: int
    num_kv_tokens: int
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Job:
    """read: a function of a module, called with this process' desk, the body and `arguments`.

    adapters: names of the LoRA adapters that there are now.
    """

    read: Callable[..., Any]
    arguments: tuple[Any, ...]
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedError:
    """An error of the runtime's own: a pickle of itself would call its class with its message alone."""

    kind: type[HeadwayRuntimeError]
    arguments: tuple[Any, ...]
    members: dict[str, Any]

    def unpack(self) -> HeadwayRuntimeError:
        error = self.kind.__new__(self.kind)
        error.args = self.arguments
        error.__dict__.update(self.members)
        return error


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job came to; an error is for the client, a bug's name for nobody."""

    result: Any = None
    error: PackedError | None = None
    bug: str | None = None


class _Desk:
    def __init__(self, launch: ReadingLaunch) -> None:
        files = load_model_files(launch.options)
        self._model = served_model(files, launch.options, launch.max_model_len, launch.num_kv_tokens)
        self._names = launch.options.served_model_names
        self.adapters: tuple[str, ...] = ()

    def model(self) -> ServedModel:
        return self._model

    def model_for(self, wanted: str | None) -> ServedModel:
        return with_adapter(self._model, wanted, self._names)

    def served_name(self, wanted: str | None) -> str:
        return name_of((*self._names, *self.adapters), wanted)


def send(file: BinaryIO, data: bytes) -> None:
    """One piece of data behind its length. `file` is not buffered."""
    for part in (len(data).to_bytes(LENGTH_BYTES, "big"), data):
        view = memoryview(part)
        while view:
            view = view[file.write(view[:PIECE_BYTES]) :]


def receive(file: BinaryIO) -> bytearray:
    """The next piece of data. EOFError at the end."""
    return _read(file, int.from_bytes(_read(file, LENGTH_BYTES), "big"))


def _read(file: BinaryIO, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        view = view[count:]
    return data


def _answer(desk: _Desk, job: Job, raw: bytes) -> Answer:
    desk.adapters = job.adapters
    try:
        return Answer(job.read(desk, raw, *job.arguments))
    except HeadwayRuntimeError as error:
        return Answer(error=PackedError(type(error), error.args, dict(error.__dict__)))
    except Exception as error:  # noqa: BLE001 - a bug is the server's error, as it is in the other process
        sys.excepthook(type(error), error, error.__traceback__)
        return Answer(bug=type(error).__name__)


def main() -> int:
    """Serve jobs until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal's go to all; the parent decides
    jobs = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - as long as this process lives
    answers = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115
    os.dup2(2, 1)  # what anybody prints is no answer
    try:
        launch: ReadingLaunch = pickle.loads(receive(jobs))
        die_with_parent(launch.parent_pid)
        os.nice(NICENESS)
        desk = _Desk(launch)
        while True:
            job: Job = pickle.loads(receive(jobs))
            send(answers, pickle.dumps(_answer(desk, job, bytes(receive(jobs))), pickle.HIGHEST_PROTOCOL))
    except (EOFError, BrokenPipeError):
        return 0

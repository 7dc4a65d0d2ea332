"""The processes that read large bodies, as the HTTP process sees them: started, used, and ended.

The first is started when the first large body comes, which waits a second for it; there are NUM_PROCESSES at
most, each with one body at a time. One that takes too long is killed; one that has read a very large body
ends, and the memory that this took with it.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.reading_process import Answer, Job, ReadingLaunch, receive, send

NUM_PROCESSES = 2
# What reading a body may take, the start of a process and a vocabulary included.
READING_SECONDS = 60.0
# Not as a module of its own: what it pickles has to have the same name in both processes.
COMMAND = "from headway_runtime.server import reading_process; raise SystemExit(reading_process.main())"
# A process whose body was as large as this is not used again.
LARGEST_KEPT_BYTES = 4 * 2**20


class ReadingPool:
    """`read` is called in threads of `threads`, which are as many as there may be processes."""

    def __init__(self, launch: Callable[[], ReadingLaunch]) -> None:
        """launch: called when a process starts."""
        self.threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="reading")
        self._launch = launch
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False

    def read(
        self,
        read: Callable[..., Any],
        raw: bytes,
        arguments: tuple[Any, ...],
        adapters: tuple[str, ...] = (),
    ) -> Any:
        """What `read` returns or raises in a process of its own. adapters: names of those there are."""
        process = self._take()
        timer = threading.Timer(READING_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            answer = process.ask(Job(read, arguments, adapters), raw)
        except (OSError, EOFError) as error:
            self._end(process)
            # Without Retry-After: the time is the body's own, and another replica would take as long.
            raise HttpError(
                503,
                f"the body of {len(raw)} bytes could not be read within {READING_SECONDS:g} s; send less",
                code="body_not_read",
            ) from error
        finally:
            timer.cancel()
        self._give_back(process, len(raw))
        if answer.error is not None:
            raise answer.error.unpack()
        if answer.bug is not None:
            raise RuntimeError(f"a body could not be read: {answer.bug}")
        return answer.result

    def close(self) -> None:
        """End the processes; what is being read fails."""
        with self._lock:
            self._is_closed = True
            processes = list(self._all)
        for process in processes:
            self._end(process)
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> "_Process":
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is not None:
            if found.is_alive:
                return found
            self._end(found)
        process = _Process(self._launch())
        with self._lock:
            self._all.add(process)
            is_late = self._is_closed
        if is_late:
            process.kill()
        return process

    def _give_back(self, process: "_Process", num_bytes: int) -> None:
        with self._lock:
            is_kept = num_bytes <= LARGEST_KEPT_BYTES and not self._is_closed
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            self._end(process)

    def _end(self, process: "_Process") -> None:
        process.end()
        with self._lock:
            self._all.discard(process)


class _Process:
    """One of them."""

    def __init__(self, launch: ReadingLaunch) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "RAYON_NUM_THREADS": "1"},
        )
        self._launch: ReadingLaunch | None = launch

    def ask(self, job: Job, raw: bytes) -> Answer:
        """OSError or EOFError if the process has ended."""
        jobs = cast("BinaryIO", self._process.stdin)
        if self._launch is not None:
            send(jobs, pickle.dumps(self._launch))
            self._launch = None
        send(jobs, pickle.dumps(job))
        send(jobs, raw)
        answer: Answer = pickle.loads(receive(cast("BinaryIO", self._process.stdout)))
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Whoever waits for its answer is told so."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            cast("BinaryIO", pipe).close()

"""The engine process as its parent sees it: started first of all, watched, and ended with it.

Owns the child, the pipe that ends it when this process dies, and the private folder of its socket.
Imports nothing heavy: it runs before anything else does, so that both processes start at once.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from headway_runtime.cpus import cgroup_cpu_limit
from headway_runtime.server.messages import Launch
from headway_runtime.server.options import ServeOptions
from headway_runtime.thread_governor import can_tell_waiting

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "headway_runtime.server.engine_process")
# A Unix socket's path may have 107 bytes; the folder's name takes some 20 and the socket's own 7.
LONGEST_TEMPORARY_PATH = 70
# Turns of GNU OpenMP's waiting loop, some ten nanoseconds each.
SPIN_COUNT = "20000"


class EngineHandle:
    """One running engine process."""

    def __init__(
        self, options: ServeOptions, started_at: float, command: Sequence[str] = ENGINE_COMMAND
    ) -> None:
        """Start it. `started_at` is the timeline's origin; `command` gets the launch as one more argument."""
        temporary = tempfile.gettempdir()
        self.directory = Path(
            tempfile.mkdtemp(
                prefix="headway-", dir=temporary if len(temporary) <= LONGEST_TEMPORARY_PATH else "/tmp"
            )
        )
        self.address = f"ipc://{self.directory}/engine"
        read_end, self._lifeline = os.pipe()
        launch = Launch(
            engine=options.engine,
            address=self.address,
            directory=str(self.directory),
            lifeline_fd=read_end,
            parent_pid=os.getpid(),
            started_at=started_at,
            log_level=options.log_level,
        )
        environment = engine_environment(os.environ, options.engine.num_threads)
        try:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(launch).decode()],
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except OSError:
            os.close(self._lifeline)
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit` with the exit status, from another thread, as soon as the process has ended."""

        def wait() -> None:
            on_exit(self._process.wait())

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    def kill(self) -> None:
        """End the process and remove its folder at once."""
        self._process.kill()
        self.remove_directory()

    def remove_directory(self) -> None:
        """Remove the socket's name. Those who are connected stay so."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self, timeout_seconds: float) -> None:
        """Wait for a process that was told to end; after `timeout_seconds`, kill it."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process did not end within %g s and is killed", timeout_seconds)
            self._process.kill()
            self._process.wait()
        os.close(self._lifeline)
        self.remove_directory()


def engine_environment(environment: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """What OpenMP, MKL and the C library read when they load, before the engine could set anything.

    Waiting worker threads spin for some tenths of a millisecond, the longest that a step's operators lie
    apart: with sleeping ones a step takes a quarter to a half longer (docs/log.md). On busy cores spinning
    makes it many times slower, so it is for systems where `ThreadGovernor` can tell that; elsewhere, and
    under a container's CPU limit, which spinning would use up, they sleep. Large blocks of memory get large
    pages, since a step reads all weights once. The user's own settings win.
    """
    threads = str(num_threads)
    spins = can_tell_waiting() and cgroup_cpu_limit() is None
    waiting = {"GOMP_SPINCOUNT": SPIN_COUNT} if spins else {"OMP_WAIT_POLICY": "passive"}
    if environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        waiting = {}
    return {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **waiting,
        **environment,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }

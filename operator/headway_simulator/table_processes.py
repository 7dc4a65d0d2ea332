"""What the oracle simulates of each interval by itself, in several processes.

An interval's simulations hang on nothing but the load and the setting, so that whoever works them out, and in
which order, changes nothing. No process outlives who began it: each looks twice a second whether that is
gone, or wants no more of it.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_byte
from typing import Protocol

from headway_simulator.courses import Table
from headway_simulator.errors import SimulatorError

LOOK_SECONDS = 0.5


class Search(Protocol):
    """What has a table of misses for each of its intervals; it is sent to each process, or inherited."""

    @property
    def num_intervals(self) -> int: ...

    def misses(self, index: int) -> Table:
        """Of one interval."""
        ...


_misses: Callable[[int], Table] | None = None


def tables_of(search: Search, num_processes: int) -> Iterator[Table]:
    """The tables of all intervals, in order, as they come.

    Raises SimulatorError where a process was killed.
    """
    intervals = range(search.num_intervals)
    num_processes = min(num_processes, search.num_intervals)
    if num_processes <= 1:
        yield from map(search.misses, intervals)
        return
    # Without a lock, which one that is killed might hold.
    is_over = multiprocessing.Value("b", 0, lock=False)
    try:
        with ProcessPoolExecutor(
            num_processes, initializer=_begin, initargs=(search, is_over, os.getpid())
        ) as pool:
            is_whole = False
            try:
                yield from pool.map(_table, intervals)
                is_whole = True
            finally:
                # Whatever ends it early goes on to who asked; nobody works on for it.
                is_over.value = not is_whole
    except BrokenProcessPool as error:
        raise SimulatorError(
            f"one of {num_processes} processes that look for the oracle was killed, most likely for want of "
            "memory; remedy: a lower --jobs, or --no-oracle"
        ) from error


def _begin(search: Search, is_over: c_byte, parent: int) -> None:
    """In each process. A terminal interrupts all of them; it is the first one's to say what follows."""
    global _misses
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(is_over, parent), daemon=True).start()
    # What was inherited is nobody's garbage, and looking through it would copy it.
    gc.freeze()
    _misses = search.misses


def _end_with(is_over: c_byte, parent: int) -> None:
    while not is_over.value and os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _table(index: int) -> Table:
    assert _misses is not None
    return _misses(index)

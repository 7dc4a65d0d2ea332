"""What the oracle simulates of each interval by itself, in several processes; and what in one, ahead of them.

An interval's simulations hang on nothing but the load and the setting, so that whoever works them out, and in
which order, changes nothing. No process outlives who began it: each looks twice a second whether that is
gone, or wants no more of it.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from ctypes import c_byte
from multiprocessing.context import BaseContext
from typing import Any, Protocol, TypeVar

from headway_simulator.courses import Table
from headway_simulator.errors import SimulatorError

LOOK_SECONDS = 0.5
Found = TypeVar("Found")


class Search(Protocol):
    """What has a table of misses for each of its intervals; it is sent to each process, or inherited."""

    @property
    def num_intervals(self) -> int: ...

    def misses(self, index: int) -> Table:
        """Of one interval."""
        ...


class UnwantedError(Exception):
    """Nobody waits for what comes of it any more."""


_search: Any = None


def tables_of(search: Search, num_processes: int) -> Iterator[Table]:
    """The tables of all intervals, in order, as they come.

    Raises SimulatorError where a process was killed.
    """
    intervals = range(search.num_intervals)
    num_processes = min(num_processes, search.num_intervals)
    if num_processes <= 1:
        yield from map(search.misses, intervals)
        return
    with processes(search, num_processes) as pool:
        yield from pool.map(_table, intervals)


@contextmanager
def beside(search: Any, work: Callable[[Any], Found]) -> Iterator[Callable[[], Found]]:
    """Has a process of its own begin with `work(search)`; yields what waits for what comes of it.

    work: a function of a module or a class. The process ends once somebody has what comes of it, or with the
    block. Raises SimulatorError where it was killed.
    """
    with suppress(UnwantedError), processes(search, 1) as pool:
        future = pool.submit(work_of, work)

        def found() -> Found:
            try:
                return future.result()
            finally:
                pool.shutdown(wait=False)

        yield found
        if not future.done():
            raise UnwantedError


@contextmanager
def processes(search: Any, number: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that have the search (`work_of`). What ends the block early ends them.

    Raises SimulatorError where one was killed.
    """
    # Without a lock, which one that is killed might hold.
    is_over = _context().Value("b", 0, lock=False)
    try:
        arguments = search, is_over, os.getpid()
        with ProcessPoolExecutor(number, _context(), _begin, arguments) as pool:
            is_whole = False
            try:
                yield pool
                is_whole = True
            finally:
                # Whatever ends it early goes on to who asked; nobody works on for it.
                is_over.value = not is_whole
    except BrokenProcessPool as error:
        killed = "a process that looks" if number == 1 else f"one of {number} processes that look"
        raise SimulatorError(
            f"{killed} for the oracle was killed, most likely for want of memory; remedy: a lower --jobs, or "
            "--no-oracle"
        ) from error


def _context() -> BaseContext:
    """Of processes whose parent is who began them: of a fork server's it would be that."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _begin(search: Any, is_over: c_byte, parent: int) -> None:
    """In each process. A terminal interrupts all of them; it is the first one's to say what follows."""
    global _search
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(is_over, parent), daemon=True).start()
    # What was inherited is nobody's garbage, and looking through it would copy it.
    gc.freeze()
    _search = search


def _end_with(is_over: c_byte, parent: int) -> None:
    while not is_over.value and os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _table(index: int) -> Table:
    found: Table = _search.misses(index)
    return found


def work_of(work: Callable[[Any], Found]) -> Found:
    """In one of them."""
    return work(_search)

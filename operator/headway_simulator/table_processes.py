"""What the oracle simulates of each interval by itself, in several processes.

An interval's simulations hang on nothing but the load and the setting, so that whoever works them out, and in
which order, changes nothing.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Protocol

from headway_simulator.courses import Table


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

    Raises BrokenProcessPool where a process was killed.
    """
    intervals = range(search.num_intervals)
    num_processes = min(num_processes, search.num_intervals)
    if num_processes <= 1:
        yield from map(search.misses, intervals)
        return
    with ProcessPoolExecutor(num_processes, initializer=_begin, initargs=(search,)) as pool:
        try:
            yield from pool.map(_table, intervals)
        except BaseException:
            # Whoever interrupts does not wait for what has not begun.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(search: Search) -> None:
    """In each process. A terminal interrupts all of them; it is the first one's to say what follows."""
    global _misses
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _misses = search.misses


def _table(index: int) -> Table:
    assert _misses is not None
    return _misses(index)

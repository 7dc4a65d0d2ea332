"""Memory that is cleared before it is needed, for whoever packs weights into it.

The system clears each page that a process writes for the first time, which takes longer than writing it.
There is one such memory in a process; where none was prepared, nothing is given.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable

# Cleared at once: a large page, so that who waits for it does not wait long.
PIECE_BYTES = 2 << 20
# Vectors are loaded from multiples of their size.
ALIGNMENT = 64
# What others do is more urgent.
NICENESS = 19


class ClearedMemory:
    """Memory that a thread clears piece by piece, until someone takes of it."""

    def __init__(self, num_bytes: int, num_wanted: Callable[[], int]) -> None:
        """num_wanted: asked on the thread, how much of it is to be cleared. OSError without room."""
        self._num_wanted = num_wanted
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # not all systems have large pages
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._taken = 0
        # Of it, from the start.
        self.num_cleared = 0
        self._is_taken = threading.Event()
        self._thread = threading.Thread(target=self._clear, name="headway-head-start", daemon=True)
        self._thread.start()

    def take(self, num_bytes: int) -> memoryview | None:
        """Zeros that are nobody else's; None where so many are not left."""
        self._stop()
        start, end = self._taken, self._taken + num_bytes
        if end > len(self._pages):
            return None
        self._taken = -(-end // ALIGNMENT) * ALIGNMENT
        return memoryview(self._pages)[start:end]

    def give_back(self) -> None:
        """What was cleared and not taken."""
        self._stop()
        first = -(-self._taken // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < len(self._pages):
            self._pages.madvise(mmap.MADV_DONTNEED, first)
        self._taken = len(self._pages)

    def _stop(self) -> None:
        self._is_taken.set()
        self._thread.join()

    def _clear(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        end = min(self._num_wanted(), len(self._pages))
        for start in range(0, end, PIECE_BYTES):
            if self._is_taken.is_set():
                return
            num_bytes = min(PIECE_BYTES, end - start)
            ctypes.memset(self._start + start, 0, num_bytes)
            self.num_cleared = start + num_bytes


_memory: ClearedMemory | None = None


def prepare(num_bytes: int, num_wanted: Callable[[], int]) -> None:
    """Begin to clear, of so much, what turns out to be wanted. OSError without room."""
    global _memory
    assert _memory is None, "there is one in a process"
    _memory = ClearedMemory(num_bytes, num_wanted)


def take(num_bytes: int) -> memoryview | None:
    """Zeros for one packed weight, aligned for vectors; None where none were prepared or no more are left."""
    return None if _memory is None else _memory.take(num_bytes)


def num_cleared() -> int:
    """Bytes that weights will lie in and the system no longer counts as free."""
    return 0 if _memory is None else _memory.num_cleared


def give_back() -> None:
    """All weights are packed: the system gets what is left."""
    global _memory
    if _memory is not None:
        _memory.give_back()
        _memory = None

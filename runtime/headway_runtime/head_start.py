"""What the system does for a start on another core while PyTorch is imported.

The import keeps one core busy for seconds, and nothing that needs it can begin before. Meanwhile the
checkpoint is read from its disk, and memory for packed weights is found and cleared, which takes ten times as
long as writing them into it. Imports no torch. There is one head start in a process; whoever packs weights
takes memory from it, and gets none where there was no head start.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from headway_runtime.engine_options import EngineOptions
from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.memory import DTYPE_BYTES, free_memory_bytes, num_weights
from headway_runtime.model_config import read_model_config

NVIDIA_DRIVER = Path("/proc/driver/nvidia")
# Cleared at once: a large page, so that who waits for it does not wait long.
PIECE_BYTES = 2 << 20
# Vectors are loaded from multiples of their size.
ALIGNMENT = 64
# What others do is more urgent.
NICENESS = 19


class ClearedMemory:
    """Memory that a thread clears piece by piece, until someone takes of it."""

    def __init__(self, num_bytes: int) -> None:
        """OSError without room."""
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # not all systems have large pages
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._taken = 0
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
        if not _weights_are_packed():
            return
        for start in range(0, len(self._pages), PIECE_BYTES):
            if self._is_taken.is_set():
                return
            ctypes.memset(self._start + start, 0, min(PIECE_BYTES, len(self._pages) - start))


_memory: ClearedMemory | None = None


def begin(options: EngineOptions) -> None:
    """For the checkpoint that these options name. Does nothing where there is nothing to gain."""
    global _memory
    if options.load_format == "dummy":
        return
    folder = Path(options.model_path)
    if hasattr(os, "posix_fadvise"):
        paths = sorted(folder.glob("*.safetensors"))
        threading.Thread(target=read_ahead, args=(paths,), name="headway-read-ahead", daemon=True).start()
    is_for_cpu = options.device == "cpu" or (options.device == "auto" and not NVIDIA_DRIVER.exists())
    if not is_for_cpu or not hasattr(mmap, "MADV_DONTNEED"):
        return
    # What is wrong with the model or the machine is told by who loads it.
    with contextlib.suppress(HeadwayRuntimeError, OSError):
        model = read_model_config(folder)
        num_bytes = num_weights(model) * DTYPE_BYTES["bfloat16"]
        is_packed = (model.dtype if options.dtype == "auto" else options.dtype) == "bfloat16"
        if is_packed and num_bytes < free_memory_bytes():
            _memory = ClearedMemory(num_bytes)


def take(num_bytes: int) -> memoryview | None:
    """Zeros for one packed weight, aligned for vectors; None without a head start or when no more is left."""
    return None if _memory is None else _memory.take(num_bytes)


def end() -> None:
    """All weights are packed."""
    global _memory
    if _memory is not None:
        _memory.give_back()
        _memory = None


def read_ahead(paths: Iterable[Path]) -> None:
    """Have the system read these files into its cache; what is wrong with one is told by who reads it."""
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _weights_are_packed() -> bool:
    try:
        from headway_runtime.kernels.cpu.processor import multiplies_pairs
    except ImportError:
        return False
    return multiplies_pairs()

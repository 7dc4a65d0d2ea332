"""Main memory for slots, exactly as much as was asked for: on a CPU taken as it fills, beside a GPU pinned.

PyTorch's own pinned memory is rounded up to a power of two: of 40 GiB it would make 64. So the pages are the
system's, and CUDA is told of them (`cudaHostRegister`); a device then reads and writes them by itself, as it
does PyTorch's. They are shared pages, as mmap gives them unless told otherwise: private ones that are pinned
would be copied, all of them, whenever this process forks. Knows nothing of what lies in them.
"""

import contextlib
import ctypes
import logging
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from headway_runtime.cpus import usable_cpus
from headway_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

# Since Linux 5.14; other systems refuse it.
MADV_POPULATE_WRITE = 23
POPULATED_AT_ONCE_BYTES = 64 << 20
# Threads that have the system provide pages which are pinned next: it clears them first.
MOST_THREADS = 8
# cudaHostRegisterPortable: pinned for whatever device of this process.
PORTABLE = 1
# Whose pages nobody may be given.
_left: list[Tensor] = []


class PinnedMemory:
    """bytes: uint8. Pinned until it is closed, or nobody has it any more; a view of them keeps the pages."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """ConfigError where so much is not to be had. device: that will copy."""
        self.bytes = _pages(num_bytes)
        _populate_at_once(self.bytes)
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cuda.cudaHostRegister(self.bytes.data_ptr(), num_bytes, PORTABLE)
        if int(error) != 0:
            _forget_error(device)
            raise ConfigError(
                f"--kv-offloading-size: {num_bytes} bytes of main memory cannot be pinned for the GPU "
                f"({_told(cuda, error)}); lower it"
            )
        self._end = weakref.finalize(self, _unregister, cuda, self.bytes)
        # With the process, the system takes all back.
        self._end.atexit = False

    def close(self) -> None:
        """No more pinned. Copies must have ended."""
        self._end()

    def leave(self) -> None:
        """Pinned until the process ends: CUDA might wait for copies that the device may never end."""
        if self._end.detach() is not None:
            _left.append(self.bytes)


def lazy_memory(num_bytes: int) -> Tensor:
    """Memory whose pages a thread has the system provide, so that no step waits for that: uint8.

    Where it does not, they come when they are first written. ConfigError where so much is not to be had.
    """
    memory = _pages(num_bytes)
    threading.Thread(target=_populate, args=(memory,), name="headway-kv-host", daemon=True).start()
    return memory


def _pages(num_bytes: int) -> Tensor:
    try:
        pages = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"--kv-offloading-size: {num_bytes} bytes of memory cannot be had ({error}); lower it"
        ) from error
    with contextlib.suppress(OSError, AttributeError):  # not all systems have large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _populate(memory: Tensor) -> None:
    for start in range(0, memory.nbytes, POPULATED_AT_ONCE_BYTES):
        if not _populate_part(memory, start):
            return


def _populate_at_once(memory: Tensor) -> None:
    """By several threads. What the system does not provide so, registering does."""
    starts = range(0, memory.nbytes, POPULATED_AT_ONCE_BYTES)
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cpus())) as pool:
        for _ in pool.map(lambda start: _populate_part(memory, start), starts):
            pass


def _populate_part(memory: Tensor, start: int) -> bool:
    """Whether the system does so."""
    # Not the mmap module's own, during which no other thread runs.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    length = min(POPULATED_AT_ONCE_BYTES, memory.nbytes - start)
    if madvise(memory.data_ptr() + start, length, MADV_POPULATE_WRITE) == 0:
        return True
    logger.debug("the system provides memory as it is written: %d", ctypes.get_errno())
    return False


def _unregister(cuda: Any, memory: Tensor) -> None:
    """Has the memory, so that its pages are there for as long as CUDA knows of them."""
    error = cuda.cudaHostUnregister(memory.data_ptr())
    if int(error) != 0:
        logger.warning("%d bytes stay pinned until this process ends: %s", memory.nbytes, _told(cuda, error))


def _forget_error(device: torch.device) -> None:
    """CUDA would tell it once more, to whoever launches next."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _told(cuda: Any, error: Any) -> str:
    return f"CUDA error {int(error)}, {cuda.cudaGetErrorString(error)}"

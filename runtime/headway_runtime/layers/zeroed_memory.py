"""Zeros that cost nothing until they are written: memory that the system hands out page by page.

`torch.zeros` writes all of it at once, and for a KV cache of gigabytes that was the longest part of a start.
Owns the mapping and knows nothing of what lies in it.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

from headway_runtime.errors import ConfigError


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU, its pages come when they are first touched. ConfigError without room."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"kv_cache_memory_bytes={size!r} cannot be had ({error}); lower --kv-cache-memory-bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Each step reads blocks from all over it: large pages need fewer addresses looked up. Not all systems
        # have them.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

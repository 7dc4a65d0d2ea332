"""What the GPU gives at this moment: the ceilings that everything else is held against, and how to time.

Copies count bytes read and written; products are of random numbers, since zeros multiply faster.
"""

import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COPY_BYTES = 4 * 2**30
PRODUCT_SIZE = 8192
TIMES = 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bytes_per_second: of a large copy. bfloat16_per_second: operations of a large product."""

    bytes_per_second: float
    bfloat16_per_second: float


def milliseconds(work: Callable[[], object], device: str, times: int = TIMES, warm_up: int = 3) -> float:
    """Median time of `work` on the device, each run timed with events; by the host's clock on a CPU."""
    for _ in range(warm_up):
        work()
    if device == "cpu":
        found = []
        for _ in range(times):
            began_at = time.perf_counter()
            work()
            found.append((time.perf_counter() - began_at) * 1e3)
        return statistics.median(found)
    make_event: Any = torch.cuda.Event
    starts, ends = ([make_event(enable_timing=True) for _ in range(times)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(one.elapsed_time(other) for one, other in zip(starts, ends, strict=True)))


def ceilings(device: str) -> Ceilings:
    """Measured now."""
    scale = 1 if device == "cuda" else 256
    source = torch.ones(COPY_BYTES // scale // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), device)
    size = PRODUCT_SIZE // (1 if device == "cuda" else 16)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = milliseconds(lambda: left @ right, device)
    return Ceilings(2 * source.nbytes / copy * 1e3, 2 * size**3 / product * 1e3)


def conditions(device: str) -> dict[str, Any]:
    """What must be known to read the numbers."""
    import transformers

    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    )
    is_cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda if is_cuda else None,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": git.stdout.strip() or None,
        "command": " ".join(sys.argv),
    }

"""What the GPU gives at this moment: the ceilings that everything else is held against, and its name.

Copies count bytes read and written; products are of random numbers, since zeros multiply faster.
"""

import importlib.metadata
import platform
import subprocess
import sys
from typing import Any

import torch
from benchmarks.gpu.costs import Ceilings
from benchmarks.gpu.timing import milliseconds

COPY_BYTES = 4 * 2**30
PRODUCT_SIZE = 8192


def ceilings(device: str) -> Ceilings:
    """Measured now."""
    is_cuda = device == "cuda"
    source = torch.ones(COPY_BYTES // (1 if is_cuda else 256) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), device)
    size = PRODUCT_SIZE // (1 if is_cuda else 64)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = milliseconds(lambda: left @ right, device)
    operations = 2 * size**3 * 1e3
    return Ceilings(
        2 * source.nbytes / copy * 1e3,
        operations / product,
        operations / _float8_milliseconds(size, device) if _multiplies_float8(device) else None,
        operations / _int8_milliseconds(size, device) if is_cuda else None,
    )


def _multiplies_float8(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def _float8_milliseconds(size: int, device: str) -> float:
    """With a scale of each row and output, as layers multiply, and exact sums."""
    left, right = (
        torch.randn(size, size, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn) for _ in range(2)
    )
    rows, outputs = torch.rand(size, 1, device=device), torch.rand(1, size, device=device)
    return milliseconds(
        lambda: torch._scaled_mm(
            left, right.t(), scale_a=rows, scale_b=outputs, out_dtype=torch.bfloat16, use_fast_accum=False
        ),
        device,
    )


def _int8_milliseconds(size: int, device: str) -> float:
    left, right = (torch.randint(-128, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
    return milliseconds(lambda: torch._int_mm(left, right.t()), device)


def works(device: str) -> bool:
    """Whether the device does what it is asked to; after an access to foreign memory it never does again."""
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


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

"""The middle of a SiLU-gated MLP."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.cpu_kernels import silu_and_multiply


class SiluGate:
    """silu(gate) * up, where both lie side by side in rows of 2 * size."""

    __slots__ = ("_kernel",)

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kernel = silu_and_multiply(size, dtype, device)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [rows, 2 * size], contiguous. Returns [rows, size]."""
        if self._kernel is not None:
            return self._kernel(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)

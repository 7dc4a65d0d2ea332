"""The middle of a gated MLP."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.cpu_kernels import activate_and_multiply
from headway_runtime.model_config import Activation


class Gate:
    """activation(gate) * up, where both lie side by side in rows of 2 * size."""

    __slots__ = ("_activation", "_kernel")

    def __init__(self, activation: Activation, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = activation
        self._kernel = activate_and_multiply(activation, size, dtype, device)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [rows, 2 * size], contiguous. Returns [rows, size]."""
        if self._kernel is not None:
            return self._kernel(gate_up)
        gate, up = gate_up.chunk(2, -1)
        match self._activation:
            case "silu":
                return functional.silu(gate).mul_(up)
            case "gelu":
                return functional.gelu(gate).mul_(up)
            case "gelu_tanh":
                return functional.gelu(gate, approximate="tanh").mul_(up)

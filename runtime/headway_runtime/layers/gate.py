"""The middle of a gated MLP."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers import cpu_kernels, gpu_kernels
from headway_runtime.layers.coded_linear import CodedLinear
from headway_runtime.layers.linear import AnyLinear, Linear
from headway_runtime.layers.row_codes import Rows, product_of
from headway_runtime.model_config import Activation


class Gate:
    """activation(gate) * up, where both lie side by side in rows of 2 * size."""

    __slots__ = ("_activation", "_kernel", "_ours", "_product")

    def __init__(self, activation: Activation, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = activation
        self._ours = gpu_kernels.activate_and_multiply(activation, size, device)
        self._kernel = self._ours or cpu_kernels.activate_and_multiply(activation, size, dtype, device)
        self._product = gpu_kernels.gated_product(activation, device)

    @property
    def activation(self) -> Activation:
        return self._activation

    def of_product(self, linear: AnyLinear, x: Rows, codes: torch.dtype | None) -> Rows:
        """The middle of `linear(x)`; where there is a kernel for both, in one. x: [rows, inputs].

        codes: what the next product wants it in; None: as numbers.
        """
        if codes is not None:
            assert self._ours is not None, "codes are wanted by products of kernels"
            return self._ours.codes(product_of(linear, x), codes)
        if isinstance(x, Tensor) and isinstance(linear, CodedLinear) and len(x) <= linear.most_rows:
            return linear.gated(x, self._activation)
        product = self._product
        if product is None or not isinstance(linear, Linear) or not isinstance(x, Tensor):
            return self(product_of(linear, x))
        if len(x) <= product.most_rows:
            return product(x, linear.weight, linear.bias)
        return self(linear(x))

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

"""Root mean square normalisation of hidden states (arXiv 1910.07467)."""

import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.cpu_kernels import rms_norm


class RMSNorm:
    """Scales rows to a mean square of one, then each column by `weight` [size]. Rows are contiguous."""

    __slots__ = ("_epsilon", "_kernel", "_weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._kernel = rms_norm(len(weight), epsilon, weight.dtype, weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, size]."""
        if self._kernel is not None:
            return self._kernel.norm(x, self._weight)
        return functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon)

    def add_(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to `x`, in place; returns the norm of the sum."""
        if self._kernel is not None:
            return self._kernel.add_and_norm(x, delta, self._weight)
        return self(x.add_(delta))

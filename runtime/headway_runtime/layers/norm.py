"""Root mean square normalisation (arXiv 1910.07467) of hidden states, and of single heads."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers import cpu_kernels, gpu_kernels
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.layers.row_codes import Rows


class RMSNorm:
    """Scales rows to a mean square of one, then each column by `weight` [size]. Rows are contiguous."""

    __slots__ = ("_epsilon", "_kernel", "_ours", "_weight")

    def __init__(self, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> None:
        """dtype: of the rows, where the weight is in float32 because it is finer than they are."""
        self._weight = weight
        self._epsilon = epsilon
        size, device = len(weight), weight.device
        self._ours = gpu_kernels.rms_norm(size, epsilon, device)
        self._kernel = self._ours or cpu_kernels.rms_norm(
            size, epsilon, dtype or weight.dtype, weight.dtype, device
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, size]."""
        if self._kernel is not None:
            return self._kernel.norm(x, self._weight)
        if x.dtype == self._weight.dtype:
            return functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon)
        return functional.rms_norm(x.float(), self._weight.shape, self._weight, self._epsilon).to(x.dtype)

    def add_(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to `x`, in place; returns the norm of the sum."""
        if self._kernel is not None:
            return self._kernel.add_and_norm(x, delta, self._weight)
        return self(x.add_(delta))

    def rows(self, x: Tensor, delta: Tensor | None, codes: torch.dtype | None) -> Rows:
        """The same, as codes where a product wants those; without `delta` nothing is added."""
        if codes is not None:
            assert self._ours is not None, "codes are wanted by products of kernels"
            return self._ours.codes(x, delta, None, self._weight, codes)
        return self(x) if delta is None else self.add_(x, delta)

    def add_normed_(self, x: Tensor, delta: Tensor, norm: "RMSNorm") -> Tensor:
        """The same of `norm` of `delta`, which has the same epsilon; `delta` stays as it is."""
        if self._ours is not None:
            return self._ours.norm_add_and_norm(x, delta, norm._weight, self._weight)
        return self.add_(x, norm(delta))


class HeadNorm:
    """The same for each head by itself: of the first heads of each row, which has others behind them."""

    __slots__ = ("_epsilon", "_kernel", "_size", "_weights", "query_and_key")

    def __init__(self, weights: list[tuple[Tensor, int]], epsilon: float, dtype: torch.dtype) -> None:
        """weights: [head_dim] each, and how many heads in turn they are of. dtype: of the rows.

        Where a Triton kernel norms heads, it is told `query_and_key`: the first and the last of the weights,
        [2, head_dim], and epsilon.
        """
        by_head = [weight.float().expand(count, -1) for weight, count in weights]
        # One for each head, in float32: few enough to stay in a processor's cache, and no choice in the loop.
        self._weights = torch.cat(by_head).contiguous()
        num_heads, head_dim = self._weights.shape
        self._size = num_heads * head_dim
        self._epsilon = epsilon
        device = self._weights.device
        self.query_and_key: tuple[Tensor, float] | None = None
        if uses_triton(device):
            self.query_and_key = torch.stack((self._weights[0], self._weights[-1])), epsilon
        self._kernel = cpu_kernels.head_norm(num_heads, head_dim, epsilon, dtype, device)

    def norm_(self, rows: Tensor) -> None:
        """rows: contiguous [rows, heads * head_dim and more]; changed."""
        if self._kernel is not None:
            self._kernel.norm_(rows, self._weights)
            return
        heads = rows[:, : self._size].view(len(rows), *self._weights.shape)
        normed = functional.rms_norm(heads.float(), heads.shape[-1:], None, self._epsilon)
        heads.copy_(normed.mul_(self._weights))

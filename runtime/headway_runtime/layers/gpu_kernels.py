"""Triton kernels for a layer, or None where it has to do with others: see kernel_choice.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.layers.quantized_weights import QuantizedWeight
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.gate import ActivateAndMultiply
    from headway_runtime.kernels.triton.gated_product import GatedProduct
    from headway_runtime.kernels.triton.norm import Norm
    from headway_runtime.kernels.triton.rotate_and_store import RotateAndStore
    from headway_runtime.layers.coded_linear import CodedLinear, CodedRowsLinear
    from headway_runtime.layers.fused_experts import FusedExperts
    from headway_runtime.layers.linear import AnyLinear


def rms_norm(size: int, epsilon: float, device: torch.device) -> "Norm | None":
    """Of rows of that size, in any type. None too for rows that no program holds."""
    if not uses_triton(device):
        return None
    from headway_runtime.kernels.triton.norm import MOST_NUMBERS, Norm

    return Norm(size, epsilon) if size <= MOST_NUMBERS else None


def activate_and_multiply(
    activation: Activation, size: int, device: torch.device
) -> "ActivateAndMultiply | None":
    if not uses_triton(device):
        return None
    from headway_runtime.kernels.triton.gate import ActivateAndMultiply

    return ActivateAndMultiply(activation, size)


def gated_product(activation: Activation, device: torch.device) -> "GatedProduct | None":
    """For few rows, against a plain weight."""
    if not uses_triton(device):
        return None
    from headway_runtime.kernels.triton.gated_product import GatedProduct

    return GatedProduct(activation)


def rotate_and_store(
    shape: tuple[int, int, int, int], device: torch.device, *, writes_back: bool
) -> "RotateAndStore | None":
    """shape: KV heads, query heads to one, head size, block size. writes_back: whether keys and values are
    to be found in their rows as they will be read from the cache, too."""
    if not uses_triton(device):
        return None
    from headway_runtime.kernels.triton.rotate_and_store import RotateAndStore

    num_kv_heads, num_groups, head_dim, block_size = shape
    num_query_heads = num_kv_heads * num_groups
    return RotateAndStore(num_query_heads, num_kv_heads, head_dim, block_size, writes_back=writes_back)


def coded_linear(
    parts: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype
) -> "CodedLinear | CodedRowsLinear | None":
    """parts: alike, of one weight, one below the other. None too for what no kernel multiplies, which is all
    float32 on a GPU: its tensor cores would round it."""
    device = parts[0].codes.device
    if not uses_triton(device) or (device.type == "cuda" and dtype == torch.float32):
        return None
    from headway_runtime.layers.coded_linear import make_coded_linear

    return make_coded_linear(parts, bias, dtype)


def fused_experts(
    gate_ups: "Sequence[AnyLinear]",
    downs: "Sequence[AnyLinear]",
    activation: Activation,
    num_used: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    normalizes: bool,
) -> "FusedExperts | None":
    """Of a gated MLP of each expert. None too where their weights cannot be one, and for float32 on a GPU."""
    if not uses_triton(device) or (device.type == "cuda" and dtype == torch.float32):
        return None
    from headway_runtime.layers.fused_experts import fuse_experts

    return fuse_experts(gate_ups, downs, activation, num_used, normalizes=normalizes)

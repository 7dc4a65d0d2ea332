"""Triton kernels for a layer, or None where it has to do with others: see kernel_choice.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.layers.quantized_weights import QuantizedWeight
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.gate import ActivateAndMultiply
    from headway_runtime.kernels.triton.gated_product import GatedProduct
    from headway_runtime.kernels.triton.norm import Norm
    from headway_runtime.kernels.triton.paged_attention import PagedAttention
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


def rotate_and_store(shape: tuple[int, int, int, int], device: torch.device) -> "RotateAndStore | None":
    """shape: KV heads, query heads to one, head size, block size."""
    if not uses_triton(device):
        return None
    from headway_runtime.kernels.triton.rotate_and_store import RotateAndStore

    num_kv_heads, num_groups, head_dim, block_size = shape
    return RotateAndStore(num_kv_heads * num_groups, num_kv_heads, head_dim, block_size)


def paged_attention(
    shape: tuple[int, int, int, int], layers: Sequence[AttentionLayer], device: torch.device
) -> "PagedAttention | None":
    """shape: KV heads, query heads to one, head size, block size. layers: in the order of their indices."""
    if not uses_triton(device):
        return None
    from headway_runtime.kernels.triton.attention_tiles import HeadShape
    from headway_runtime.kernels.triton.paged_attention import PagedAttention
    from headway_runtime.kernels.triton.paged_rows import Scoring

    scorings = [Scoring(layer.scale, layer.window, layer.soft_cap) for layer in layers]
    return PagedAttention(HeadShape(*shape), scorings, device)


def coded_linear(
    parts: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype
) -> "CodedLinear | CodedRowsLinear | None":
    """parts: alike, of one weight, one below the other. None too for what no kernel multiplies, which is all
    float32 on a GPU: its tensor cores would round it."""
    device = parts[0].codes.device
    if not uses_triton(device) or (device.type != "cpu" and dtype == torch.float32):
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
    """Of a gated MLP of each expert. None too where those have a bias."""
    if not uses_triton(device):
        return None
    from headway_runtime.layers.fused_experts import fuse_experts

    return fuse_experts(gate_ups, downs, activation, num_used, dtype, normalizes=normalizes)

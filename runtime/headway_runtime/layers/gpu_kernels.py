"""Triton kernels for a layer, or None where it has to do with others: see kernel_choice.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.gate import ActivateAndMultiply
    from headway_runtime.kernels.triton.gated_product import GatedProduct
    from headway_runtime.kernels.triton.norm import Norm
    from headway_runtime.kernels.triton.paged_attention import PagedAttention
    from headway_runtime.kernels.triton.rotate_and_store import RotateAndStore


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

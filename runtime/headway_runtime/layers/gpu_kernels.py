"""Triton kernels for a layer, or None where it has to do with others: see kernel_choice.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.kernel_choice import uses_triton

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.paged_attention import PagedAttention


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

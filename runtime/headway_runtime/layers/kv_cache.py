"""The KV cache: blocks of keys and values of all layers, and how they are read and written on their device.

One layer's cache is [blocks, 2 * kv_heads, block_size, head_dim]: in each block a plane of each head's keys,
then one of each head's values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.chunk_products import attends_by_products
from headway_runtime.layers.cpu_kernels import paged_attention
from headway_runtime.layers.zeroed_memory import lazy_zeros


@dataclass(frozen=True, slots=True)
class KVShape:
    """num_blocks counts the null block."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_planes(self) -> int:
        """Keys and values of each KV head."""
        return 2 * self.num_kv_heads


class KVCache:
    """The blocks of all layers, allocated once.

    num_groups: query heads that share a KV head. layers: how each layer attends.
    """

    def __init__(
        self,
        shape: KVShape,
        num_groups: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[AttentionLayer],
    ) -> None:
        self.shape = shape
        self.num_groups = num_groups
        is_plain = all(
            layer == AttentionLayer(layer.index, shape.head_dim**-0.5) for layer in layers
        )
        self.kernels = (
            paged_attention(
                shape.num_kv_heads, num_groups, shape.head_dim, shape.block_size, dtype, device
            )
            if is_plain
            else None
        )
        self.by_products = self.kernels is not None and attends_by_products(dtype, device)
        # Zeros, because padding reads the null block: what is masked still must be finite.
        size = (shape.num_layers, shape.num_blocks, shape.num_planes, shape.block_size, shape.head_dim)
        self.data = lazy_zeros(size, dtype, device)
        self.layers = list(self.data.unbind(0))

    def clear(self, blocks: Tensor) -> None:
        """Zero some blocks in all layers."""
        self.data.index_fill_(1, blocks, 0)

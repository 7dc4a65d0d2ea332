"""The KV cache: blocks of keys and values of all layers, and how they are read and written on their device.

One layer's block is in one piece: a plane of each head's keys, [block_size, head_dim], then one of each
head's values; where they are codes (see kv_numbers.py), the scales of all planes follow, float32
[planes, block_size]. So `data[:, block]` is all there is of a block, in as many pieces as there are layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_runtime.layers import cpu_kernels, gpu_kernels
from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.chunk_products import attends_by_products
from headway_runtime.layers.kv_numbers import LARGEST_CODES, LayerKV
from headway_runtime.layers.zeroed_memory import lazy_zeros

SCALE_BYTES = torch.float32.itemsize


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

    data: all of it as bytes, [layers, blocks, bytes of a block]. layers: the same as numbers.
    """

    def __init__(
        self,
        shape: KVShape,
        num_groups: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[AttentionLayer],
        kept: torch.dtype | None = None,
    ) -> None:
        """num_groups: query heads that share a KV head. layers: how each attends.

        dtype: of what is computed with. kept: how keys and values are kept; None: as they are computed.
        """
        kept = dtype if kept is None else kept
        self.shape = shape
        self.num_groups = num_groups
        heads = (shape.num_kv_heads, num_groups, shape.head_dim, shape.block_size)
        # Either both are there, or there may be kernels of a CPU.
        self.gpu_kernels = gpu_kernels.paged_attention(heads, layers, device)
        self.rotate_and_store = gpu_kernels.rotate_and_store(heads, device)
        self.kernels = None
        if self.gpu_kernels is None:
            self.kernels = cpu_kernels.paged_attention(heads, layers, dtype, kept, device)
        self.by_products = self.kernels is not None and attends_by_products(dtype, device)
        # Whether what is read differs from what was computed.
        self.rounds = kept != dtype
        num_numbers = shape.num_planes * shape.block_size * shape.head_dim
        has_scales = kept in LARGEST_CODES
        num_scales = shape.num_planes * shape.block_size if has_scales else 0
        end = num_numbers * kept.itemsize
        # Zeros, because padding reads the null block: what is masked still must be finite.
        size = (shape.num_layers, shape.num_blocks, end + num_scales * SCALE_BYTES)
        self.data = lazy_zeros(size, torch.uint8, device)
        per_plane = (shape.num_layers, shape.num_blocks, shape.num_planes, shape.block_size)
        numbers = self.data[..., :end].view(kept).view(*per_plane, shape.head_dim)
        scales = self.data[..., end:].view(torch.float32).view(per_plane) if has_scales else None
        self.layers = [
            LayerKV(numbers[index], None if scales is None else scales[index])
            for index in range(shape.num_layers)
        ]

    def clear(self, blocks: Tensor) -> None:
        """Zero some blocks in all layers."""
        self.data.index_fill_(1, blocks, 0)

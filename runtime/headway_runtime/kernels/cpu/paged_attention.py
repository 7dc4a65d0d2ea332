"""The kernels around one model's paged KV, and the memory that they gather into."""

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.decode_attention import DecodeAttention
from headway_runtime.kernels.cpu.gather import GatherByHead
from headway_runtime.kernels.cpu.rotation import AttentionShape, RotateAndStore
from headway_runtime.kernels.cpu.softmax import CausalSoftmax


class PagedAttention:
    """One set serves all layers; for one thread at a time."""

    __slots__ = ("_gather", "_workspace", "attend_decodes", "rotate_and_store", "softmax")

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, width: int) -> None:
        self.attend_decodes = DecodeAttention(shape, dtype, width)
        self.rotate_and_store = RotateAndStore(shape, dtype, width)
        self.softmax = CausalSoftmax(shape.num_groups, dtype, width)
        plane_bytes = shape.block_size * shape.head_dim * dtype.itemsize
        self._gather = GatherByHead(2 * shape.num_kv_heads, plane_bytes)
        self._workspace = torch.empty(0, dtype=dtype)

    def gather(self, blocks: Tensor, table: Tensor) -> Tensor:
        """One sequence's keys and values: [2 * kv_heads, context, head_dim], valid until the next call.

        blocks: one layer's cache, [blocks, 2 * kv_heads, block_size, head_dim]; table: int64 ids of blocks.
        """
        _, planes, block_size, head_dim = blocks.shape
        needed = len(table) * planes * block_size * head_dim
        if needed > self._workspace.numel():
            self._workspace = self._workspace.new_empty(max(needed, 2 * self._workspace.numel()))
        gathered = self._workspace[:needed].view(planes, -1, head_dim)
        self._gather(blocks, table, gathered)
        return gathered

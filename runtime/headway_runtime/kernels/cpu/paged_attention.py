"""The kernels around one model's paged KV, and the memory that they gather into."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.decode_attention import DecodeAttention
from headway_runtime.kernels.cpu.gather import GatherByHead
from headway_runtime.kernels.cpu.kv_layout import KVLayout
from headway_runtime.kernels.cpu.rotation import RotateAndStore
from headway_runtime.kernels.cpu.scoring import Scoring
from headway_runtime.kernels.cpu.softmax import CausalSoftmax


class PagedAttention:
    """One set serves all layers; for one thread at a time.

    attend_decodes, softmax: of each layer; layers that score alike share theirs.
    """

    __slots__ = ("_gather", "_workspace", "attend_decodes", "rotate_and_store", "softmax")

    def __init__(self, layout: KVLayout, scorings: Sequence[Scoring], dtype: torch.dtype, width: int) -> None:
        """scorings: of each layer. dtype: of what is computed with."""
        decodes = {one: DecodeAttention(layout, one, dtype, width) for one in set(scorings)}
        softmax = {one: CausalSoftmax(layout.shape.num_groups, one, dtype, width) for one in set(scorings)}
        self.attend_decodes = [decodes[one] for one in scorings]
        self.softmax = [softmax[one] for one in scorings]
        self.rotate_and_store = RotateAndStore(layout, dtype, width)
        self._gather = GatherByHead(layout, dtype, width)
        self._workspace = torch.empty(0, dtype=dtype)

    def gather(self, blocks: Tensor, table: Tensor) -> Tensor:
        """One sequence's keys and values: [2 * kv_heads, context, head_dim], valid until the next call.

        blocks: one layer's numbers, [blocks, 2 * kv_heads, block_size, head_dim]; table: int64 ids of blocks.
        """
        _, planes, block_size, head_dim = blocks.shape
        needed = len(table) * planes * block_size * head_dim
        if needed > self._workspace.numel():
            self._workspace = self._workspace.new_empty(max(needed, 2 * self._workspace.numel()))
        gathered = self._workspace[:needed].view(planes, -1, head_dim)
        self._gather(blocks, table, gathered)
        return gathered

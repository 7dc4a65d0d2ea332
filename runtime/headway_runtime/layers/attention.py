"""Attention of one step's tokens over a paged KV cache, in plain PyTorch, for CPU and CUDA alike.

One layer's cache is [blocks, block_size, 2, kv_heads, head_dim], keys and values of a token side by side, so
that one write stores both and one gather of whole blocks fetches both.

- Decodes (one token each) are attended together: their blocks are gathered into a workspace, padded to the
  longest of the group, and one call of scaled_dot_product_attention serves all, with the query heads that
  share a KV head as its query length. A step is cut into groups so that padding at most doubles the work.
- Prefill chunks are attended one by one, straight from the projections where a chunk starts its sequence,
  else from a gather of the sequence's blocks under a mask.

What a step needs for all its layers alike (`AttentionInputs`) is made once per step by the runner.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """num_blocks counts the null block."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def block_numel(self) -> int:
        """Elements of one block of one layer."""
        return self.block_size * 2 * self.num_kv_heads * self.head_dim


class KVCache:
    """The blocks of all layers, allocated once. Views by block and by slot (one token) are made once too."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        row = 2 * shape.num_kv_heads * shape.head_dim
        # Zeros, because padding reads the null block: what is masked still must be finite.
        self.data = torch.zeros(
            (shape.num_layers, shape.num_blocks, shape.block_size * row), dtype=dtype, device=device
        )
        self.blocks = list(self.data.unbind(0))
        self.slots = [layer.view(shape.num_blocks * shape.block_size, row) for layer in self.blocks]

    def clear(self, blocks: Tensor) -> None:
        """Zero some blocks in all layers."""
        self.data.index_fill_(1, blocks, 0)


@dataclass(frozen=True, slots=True)
class GatheredCall:
    """One attention call over cached KV: of several decodes, or of a chunk that continues one sequence.

    start, end: its rows in the step. blocks: ids of the blocks to gather, flat, equally many per sequence.
    gathered: where they go. key, value: views of it, [sequences, kv_heads, context, head_dim].
    mask: added to the scores; None if all of the context is every row's.
    """

    start: int
    end: int
    is_chunk: bool
    blocks: Tensor
    gathered: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Rows [start, end) of the step: the first tokens of one sequence, which attend to nothing cached."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step's attention work. slots: where each token's KV is stored. calls: in the order of rows."""

    slots: Tensor
    calls: list[GatheredCall | FirstChunk]


def attend(query: Tensor, key_value: Tensor, layer: int, cache: KVCache, inputs: AttentionInputs) -> Tensor:
    """Store the step's keys and values, then attend.

    query: [tokens, kv_heads, group, head_dim]; key_value: [tokens, 2 * kv_heads * head_dim]; both rotated.
    Returns [tokens, kv_heads * group * head_dim].
    """
    cache.slots[layer].index_copy_(0, inputs.slots, key_value)
    blocks = cache.blocks[layer]
    parts = []
    for call in inputs.calls:
        rows = query[call.start : call.end]
        if isinstance(call, FirstChunk):
            parts.append(_attend_first(rows, key_value[call.start : call.end]))
            continue
        torch.index_select(blocks, 0, call.blocks, out=call.gathered)
        if call.is_chunk:
            parts.append(_attend_sequence(rows, call.key[0], call.value[0], call.mask))
        else:
            parts.append(_attend_decodes(rows, call))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decodes(query: Tensor, call: GatheredCall) -> Tensor:
    attended = functional.scaled_dot_product_attention(query, call.key, call.value, call.mask)
    return attended.reshape(query.shape[0], -1)


def _attend_first(query: Tensor, key_value: Tensor) -> Tensor:
    tokens, num_kv_heads, _, head_dim = query.shape
    key, value = key_value.view(tokens, 2, num_kv_heads, head_dim).unbind(1)
    return _attend_sequence(query, key.transpose(0, 1), value.transpose(0, 1), None)


def _attend_sequence(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """One sequence's chunk. key, value: [kv_heads, context, head_dim]. Without a mask, causal from the start.

    The query heads that share a KV head become a batch dimension along which keys and values have stride 0,
    so that nothing is copied to repeat them.
    """
    tokens, _, num_groups, _ = query.shape
    attended = functional.scaled_dot_product_attention(
        query.permute(2, 1, 0, 3),
        key.expand(num_groups, -1, -1, -1),
        value.expand(num_groups, -1, -1, -1),
        mask,
        is_causal=mask is None,
    )
    return attended.permute(2, 1, 0, 3).reshape(tokens, -1)

"""Attention of one step's tokens over a paged KV cache, in plain PyTorch, for CPU and CUDA alike.

One layer's cache is [2 * kv_heads, blocks, block_size * head_dim]: a plane for each head's keys, then one
for each head's values. So one write stores both, one gather of blocks fetches both, and what it fetches holds
each head's keys, and values, of a sequence as one matrix without gaps, which matrix products are fast on.

- Decodes (one token each) are attended together: their blocks are gathered into a workspace, padded to the
  longest of the group, and the query heads that share a KV head are the rows of one product.
- Prefill chunks are attended one by one, straight from the projections where a chunk starts its sequence,
  else from a gather of the sequence's blocks.

CUDA has scaled_dot_product_attention for both. On a CPU it takes two to seven times as long as two batched
products and a softmax, in pieces that a processor's cache holds; so those do the work there.

What a step needs for all its layers alike (`AttentionInputs`) is made once per step by the runner.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

# Rows of a chunk that are attended to at once on a CPU.
CHUNK_ROWS = 128
# Their number, and that of what they are attended against, is rounded up to a multiple of this: every shape
# of a product costs (see step_inputs.py).
CHUNK_GRAIN = 16


def attends_by_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether batched products are the fast way on this device."""
    if device.type != "cpu":
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _multiplies_bfloat16())


def _multiplies_bfloat16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


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

    @property
    def block_numel(self) -> int:
        """Elements of one block of one layer."""
        return self.block_size * self.num_planes * self.head_dim


class KVCache:
    """The blocks of all layers, allocated once. Views by block and by slot (one token) are made once too."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.by_products = attends_by_products(dtype, device)
        planes, row = shape.num_planes, shape.block_size * shape.head_dim
        # Zeros, because padding reads the null block: what is masked still must be finite.
        self.data = torch.zeros((shape.num_layers, planes, shape.num_blocks, row), dtype=dtype, device=device)
        self.blocks = list(self.data.unbind(0))
        self.slots = [layer.view(planes, -1, shape.head_dim) for layer in self.blocks]

    def clear(self, blocks: Tensor) -> None:
        """Zero some blocks in all layers."""
        self.data.index_fill_(2, blocks, 0)


@dataclass(frozen=True, slots=True)
class GatheredCall:
    """One attention call over cached KV: of several decodes, or of a chunk that continues one sequence.

    start, end: its rows in the step. blocks: ids of the blocks to gather, flat, equally many per sequence.
    gathered: where they go. key, value: views of it, [kv_heads, sequences, context, head_dim]; the context is
    whole blocks. first_position: of a chunk's first row, else 0. mask: added to the scores; [rows, context]
    of a chunk (None where products attend to it), else [kv_heads, sequences, group, context].
    """

    start: int
    end: int
    is_chunk: bool
    blocks: Tensor
    gathered: Tensor
    key: Tensor
    value: Tensor
    first_position: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Rows [start, end) of the step: the first tokens of one sequence, which attend to nothing cached."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step's attention work.

    slots: where each token's KV is stored. causal: [CHUNK_ROWS, 1, CHUNK_ROWS], added to the scores of rows
    against their own chunk. calls: in the order of rows. num_padding: rows after the last token, which attend
    to nothing and whose KV is stored nowhere.
    """

    slots: Tensor
    causal: Tensor
    calls: list[GatheredCall | FirstChunk]
    num_padding: int = 0


def attend(query: Tensor, key_value: Tensor, layer: int, cache: KVCache, inputs: AttentionInputs) -> Tensor:
    """Store the step's keys and values, then attend.

    query: [tokens, kv_heads, group, head_dim]; key_value: [tokens, 2 * kv_heads, head_dim]; both rotated.
    Returns [tokens, kv_heads * group * head_dim].
    """
    cache.slots[layer].index_copy_(1, inputs.slots, key_value[: len(inputs.slots)].transpose(0, 1))
    blocks = cache.blocks[layer]
    parts = []
    for call in inputs.calls:
        rows = query[call.start : call.end]
        if isinstance(call, FirstChunk):
            own = key_value[call.start : call.end].transpose(0, 1)
            if cache.by_products:
                key, value = _whole_grains(own, dim=1).contiguous().chunk(2)
                parts.append(_attend_chunk_by_products(rows, key, value, 0, inputs.causal))
            else:
                key, value = own.chunk(2)
                parts.append(_attend_sequence(rows, key, value, None))
            continue
        torch.index_select(blocks, 1, call.blocks, out=call.gathered)
        if not call.is_chunk:
            parts.append((_attend_decodes_by_products if cache.by_products else _attend_decodes)(rows, call))
        elif cache.by_products:
            key, value = call.key[:, 0], call.value[:, 0]
            parts.append(_attend_chunk_by_products(rows, key, value, call.first_position, inputs.causal))
        else:
            parts.append(_attend_sequence(rows, call.key[:, 0], call.value[:, 0], call.mask))
    if inputs.num_padding:
        parts.append(parts[0].new_zeros((inputs.num_padding, parts[0].shape[1])))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decodes(query: Tensor, call: GatheredCall) -> Tensor:
    assert call.mask is not None
    key, value, mask = call.key.transpose(0, 1), call.value.transpose(0, 1), call.mask.transpose(0, 1)
    attended = functional.scaled_dot_product_attention(query, key, value, mask)
    return attended.reshape(query.shape[0], -1)


def _attend_decodes_by_products(query: Tensor, call: GatheredCall) -> Tensor:
    """The same; one matrix product per sequence and KV head, all of them in one batch."""
    assert call.mask is not None
    num_sequences, num_kv_heads, num_groups, head_dim = query.shape
    queries = query.transpose(0, 1).reshape(-1, num_groups, head_dim)
    keys, values = call.key.flatten(0, 1), call.value.flatten(0, 1)
    scores = torch.baddbmm(call.mask.flatten(0, 1), queries, keys.transpose(1, 2), alpha=head_dim**-0.5)
    attended = torch.bmm(scores.softmax(-1), values)
    return attended.view(num_kv_heads, num_sequences, -1).transpose(0, 1).reshape(num_sequences, -1)


def _attend_chunk_by_products(
    query: Tensor, key: Tensor, value: Tensor, first_position: int, causal: Tensor
) -> Tensor:
    """One sequence's chunk, some rows at a time, each against what lies before and among them.

    key, value: [kv_heads, context, head_dim], from position 0, and finite numbers up to a whole grain;
    first_position: of the chunk's first row.
    """
    tokens, num_kv_heads, num_groups, head_dim = query.shape
    parts = []
    for start in range(0, tokens, CHUNK_ROWS):
        rows = _whole_grains(query[start : start + CHUNK_ROWS], dim=0)
        num_rows = min(CHUNK_ROWS, tokens - start)
        context = first_position + start + num_rows
        width = min(context + -context % CHUNK_GRAIN, key.shape[1])
        queries = rows.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        keys = key[:, :width].transpose(1, 2)
        scores = torch.baddbmm(causal[0, 0, 0], queries, keys, beta=0, alpha=head_dim**-0.5)
        by_row = scores.view(num_kv_heads, len(rows), num_groups, width)
        by_row[:, :num_rows, :, context - num_rows : context].add_(causal[:num_rows, :, :num_rows])
        if width > context:
            by_row[..., context:] = -math.inf
        attended = torch.bmm(scores.softmax(-1), value[:, :width])
        by_head = attended.view(num_kv_heads, len(rows), -1).transpose(0, 1)
        parts.append(by_head[:num_rows].reshape(num_rows, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole_grains(x: Tensor, dim: int) -> Tensor:
    """`x` with zeros up to a whole grain along `dim`."""
    missing = -x.shape[dim] % CHUNK_GRAIN
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)


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

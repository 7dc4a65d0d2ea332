"""Attention of one step's tokens over a paged KV cache, for CPU and CUDA alike.

One layer's cache is [blocks, 2 * kv_heads, block_size, head_dim]: in each block a plane of each head's keys,
then one of each head's values.

- Decodes (one token each) are attended together. On a CPU a kernel of our own reads the blocks where they
  lie; elsewhere they are gathered, padded to the longest of the group, for scaled_dot_product_attention.
- Generated tokens that are computed several at a time (because their sequence lost its KV, or because they
  are guesses to be checked) are attended as decodes, where there are kernels: so a preempted sequence goes on
  as if nothing had been, and guessing changes no number.
- Prefill chunks are attended one by one, straight from the projections where a chunk starts its sequence,
  else from a gather of the sequence's blocks. On a CPU, in float32 and, where oneDNN multiplies it, in
  bfloat16, batched products and a softmax of our own do that, in pieces that a processor's cache holds:
  scaled_dot_product_attention takes two to seven times as long there.

What a step needs for all its layers alike (`AttentionInputs`) is made once per step by the runner.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.cpu_kernels import paged_attention
from headway_runtime.layers.rotary import rotate_
from headway_runtime.layers.zeroed_memory import lazy_zeros

if TYPE_CHECKING:
    from headway_runtime.kernels.cpu.softmax import CausalSoftmax

# Rows of a chunk that are attended to at once on a CPU.
CHUNK_ROWS = 128
# Their number, and that of what they are attended against, is rounded up to a multiple of this: every shape
# of a product costs (see step_inputs.py).
CHUNK_GRAIN = 16


def attends_by_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether batched products are the fast way for chunks on this device."""
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


class KVCache:
    """The blocks of all layers, allocated once, and how they are read and written on their device.

    num_groups: query heads that share a KV head.
    """

    def __init__(self, shape: KVShape, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.num_groups = num_groups
        self.kernels = paged_attention(
            shape.num_kv_heads, num_groups, shape.head_dim, shape.block_size, dtype, device
        )
        self.by_products = self.kernels is not None and attends_by_products(dtype, device)
        # Zeros, because padding reads the null block: what is masked still must be finite.
        size = (shape.num_layers, shape.num_blocks, shape.num_planes, shape.block_size, shape.head_dim)
        self.data = lazy_zeros(size, dtype, device)
        self.layers = list(self.data.unbind(0))

    def clear(self, blocks: Tensor) -> None:
        """Zero some blocks in all layers."""
        self.data.index_fill_(1, blocks, 0)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends. index: of the layer in the cache."""

    index: int


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows [start, end) of the step, one token of each of as many sequences.

    tables: ids of each sequence's blocks, [sequences, blocks of the longest], padded with the null block.
    positions: of the tokens.
    mask: added to the scores, [sequences, 1, 1, context]; None where kernels attend.
    """

    start: int
    end: int
    tables: Tensor
    positions: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Rows [start, end) of the step: the first tokens of one sequence, which attend to nothing cached."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LaterChunk:
    """Rows [start, end) of the step: tokens of one sequence from `first_position` on.

    table: ids of the sequence's blocks, up to the chunk's last. mask: added to the scores, [rows, context];
    None where products attend.
    """

    start: int
    end: int
    first_position: int
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodesAgain:
    """Rows [start, end) of the step: generated tokens that are computed several at a time.

    Their sequence lost its KV, or they are guesses. They attend as decodes, as they did the first time or
    would one by one, so that they come out the same to the last bit.

    tables: ids of the blocks of each row's sequence, [rows, blocks]. positions: of the tokens.
    """

    start: int
    end: int
    tables: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step's attention work.

    slots: where each token's KV is stored, as block * block_size + offset.
    place: the same as blocks and offsets; None where kernels store.
    calls: in the order of rows, decodes first. num_decodes: rows of them.
    num_padding: rows after the last token, which attend to nothing and whose KV is stored nowhere.
    """

    slots: Tensor
    place: tuple[Tensor, Tensor] | None
    calls: list[Decodes | FirstChunk | LaterChunk | DecodesAgain]
    num_decodes: int
    num_padding: int = 0


def attend(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    layer: AttentionLayer,
    cache: KVCache,
    inputs: AttentionInputs,
) -> Tensor:
    """Rotate the step's queries and keys, store its keys and values, then attend.

    qkv: [tokens, query heads, then key heads, then value heads, of head_dim each]; changed.
    rotation: cosines and sines of the rows, from `RotaryTable.at`.
    Returns [tokens, query heads * head_dim].
    """
    shape, kernels = cache.shape, cache.kernels
    blocks, tokens = cache.layers[layer.index], len(inputs.slots)
    num_query_heads = shape.num_kv_heads * cache.num_groups
    if kernels is None:
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotate_(heads[:, : num_query_heads + shape.num_kv_heads], *rotation)
        assert inputs.place is not None
        numbers, offsets = inputs.place
        blocks[numbers, :, offsets] = heads[:tokens, num_query_heads:]
    elif tokens > inputs.num_decodes:
        rows = slice(inputs.num_decodes, tokens)
        kernels.rotate_and_store(qkv[rows], rotation[0][rows], rotation[1][rows], inputs.slots[rows], blocks)
    query_size = num_query_heads * shape.head_dim
    out = qkv.new_empty((len(qkv), query_size))
    query = qkv[:, :query_size].view(len(qkv), shape.num_kv_heads, cache.num_groups, shape.head_dim)
    key_value = qkv[:, query_size:].view(len(qkv), shape.num_planes, shape.head_dim)
    for call in inputs.calls:
        rows = slice(call.start, call.end)
        match call:
            case Decodes() if kernels is not None:
                kernels.attend_decodes(
                    qkv[rows],
                    rotation[0][rows],
                    rotation[1][rows],
                    blocks,
                    call.tables,
                    call.positions,
                    out[rows],
                )
            case Decodes():
                assert call.mask is not None
                out[rows] = _attend_decodes(query[rows], blocks, call.tables, call.mask)
            case FirstChunk():
                own = key_value[rows].transpose(0, 1)
                if kernels is not None and cache.by_products:
                    key, value = _whole_grains(own, dim=1).contiguous().chunk(2)
                    _attend_chunk_by_products(query[rows], key, value, 0, kernels.softmax, out[rows])
                else:
                    key, value = own.chunk(2)
                    out[rows] = _attend_sequence(query[rows], key, value, None)
            case LaterChunk():
                by_head = (
                    _by_head(blocks, call.table) if kernels is None else kernels.gather(blocks, call.table)
                )
                key, value = by_head.chunk(2)
                if kernels is not None and cache.by_products:
                    position = call.first_position
                    _attend_chunk_by_products(query[rows], key, value, position, kernels.softmax, out[rows])
                else:
                    out[rows] = _attend_sequence(query[rows], key, value, call.mask)
            case DecodesAgain():
                assert kernels is not None
                kernels.attend_decodes.attend_stored(
                    qkv[rows], blocks, call.tables, call.positions, out[rows]
                )
    if inputs.num_padding:
        out[tokens:] = 0
    return out


def _by_head(blocks: Tensor, table: Tensor) -> Tensor:
    """One sequence's keys and values, gathered: [2 * kv_heads, context, head_dim]."""
    return blocks.transpose(0, 1).index_select(1, table).flatten(1, 2)


def _attend_decodes(query: Tensor, blocks: Tensor, tables: Tensor, mask: Tensor) -> Tensor:
    planes, head_dim = blocks.shape[1], blocks.shape[3]
    by_head = blocks.transpose(0, 1).index_select(1, tables.flatten()).view(planes, len(tables), -1, head_dim)
    key, value = (half.transpose(0, 1) for half in by_head.chunk(2))
    attended = functional.scaled_dot_product_attention(query, key, value, mask)
    return attended.reshape(query.shape[0], -1)


def _attend_chunk_by_products(
    query: Tensor, key: Tensor, value: Tensor, first_position: int, softmax: "CausalSoftmax", out: Tensor
) -> None:
    """One sequence's chunk, some rows at a time, each against what lies before and among them.

    key, value: [kv_heads, context, head_dim], from position 0, and finite numbers up to a whole grain;
    first_position: of the chunk's first row. out: [tokens, query heads * head_dim].
    """
    tokens, num_kv_heads, _, head_dim = query.shape
    for start in range(0, tokens, CHUNK_ROWS):
        rows = _whole_grains(query[start : start + CHUNK_ROWS], dim=0)
        num_rows = min(CHUNK_ROWS, tokens - start)
        context = first_position + start + num_rows
        width = min(context + -context % CHUNK_GRAIN, key.shape[1])
        queries = rows.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        keys = key[:, :width].transpose(1, 2)
        scores = torch.baddbmm(queries.new_empty(()), queries, keys, beta=0, alpha=head_dim**-0.5)
        softmax(scores, first_position + start + 1)
        attended = torch.bmm(scores, value[:, :width])
        by_head = attended.view(num_kv_heads, len(rows), -1).transpose(0, 1)
        out[start : start + num_rows].view(num_rows, num_kv_heads, -1).copy_(by_head[:num_rows])


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

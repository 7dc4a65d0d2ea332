"""Attention of one step's tokens over a paged KV cache, for CPU and CUDA alike.

- On a GPU two kernels of our own read the blocks where they lie: one call is for all sequences with few
  tokens, decodes and guesses that are checked, one for all with many. The rest of this is for other devices.
- Decodes (one token each) are attended together. On a CPU a kernel of our own reads the blocks where they
  lie; elsewhere they are gathered, padded to the longest of the group, for scaled_dot_product_attention.
- Generated tokens that are computed several at a time (because their sequence lost its KV, or because they
  are guesses to be checked) are attended as decodes, where there are kernels: so a preempted sequence goes on
  as if nothing had been, and guessing changes no number.
- Prefill chunks are attended one by one, straight from the projections where a chunk starts its sequence,
  else from a gather of the sequence's blocks; on a CPU by products (see chunk_products.py).

What a step needs for all its layers alike (`AttentionInputs`) is made once per step by the runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway_runtime.kernels.triton.paged_rows import PagedRows
from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.chunk_products import (
    attend_chunk_by_products,
    first_block_seen,
    whole_grains,
)
from headway_runtime.layers.kv_cache import KVCache, KVShape
from headway_runtime.layers.kv_numbers import LayerKV
from headway_runtime.layers.masks import Masks
from headway_runtime.layers.norm import HeadNorm
from headway_runtime.layers.rotary import rotate_
from headway_runtime.layers.torch_attention import attend_decodes, attend_sequence

__all__ = [
    "AttentionInputs",
    "AttentionLayer",
    "Decodes",
    "DecodesAgain",
    "FirstChunk",
    "KVCache",
    "KVShape",
    "LaterChunk",
    "Paged",
    "attend",
]


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows [start, end) of the step, one token of each of as many sequences.

    tables: ids of each sequence's blocks, [sequences, blocks of the longest], padded with the null block.
    positions: of the tokens.
    masks: of each against the longest context.
    """

    start: int
    end: int
    tables: Tensor
    positions: Tensor
    masks: Masks


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Rows [start, end) of the step: the first tokens of one sequence, which attend to nothing cached."""

    start: int
    end: int
    masks: Masks


@dataclass(frozen=True, slots=True)
class LaterChunk:
    """Rows [start, end) of the step: tokens of one sequence from `first_position` on.

    table: ids of the sequence's blocks, up to the chunk's last. masks: of the rows against all of those.
    """

    start: int
    end: int
    first_position: int
    table: Tensor
    masks: Masks


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
class Paged:
    """Rows [start, end) of the step, of any sequences, which GPU kernels attend to."""

    start: int
    end: int
    which: PagedRows


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
    calls: Sequence[Decodes | FirstChunk | LaterChunk | DecodesAgain | Paged]
    num_decodes: int
    num_padding: int = 0


def attend(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    layer: AttentionLayer,
    cache: KVCache,
    inputs: AttentionInputs,
    head_norm: HeadNorm | None = None,
) -> Tensor:
    """Rotate the step's queries and keys, store its keys and values, then attend.

    qkv: [tokens, query heads, then key heads, then value heads, of head_dim each]; changed.
    rotation: cosines and sines of the rows, from `RotaryTable.at`.
    head_norm: of queries and keys before they are rotated.
    Returns [tokens, query heads * head_dim].
    """
    shape, kernels, tokens = cache.shape, cache.kernels, len(inputs.slots)
    kv = cache.layers[layer.index]
    _store(qkv, rotation, kv, cache, inputs, head_norm)
    query_size = shape.num_kv_heads * cache.num_groups * shape.head_dim
    out = qkv.new_empty((len(qkv), query_size))
    query = qkv[:, :query_size].view(len(qkv), shape.num_kv_heads, cache.num_groups, shape.head_dim)
    key_value = qkv[:, query_size:].view(len(qkv), shape.num_planes, shape.head_dim)
    for call in inputs.calls:
        rows = slice(call.start, call.end)
        match call:
            case Paged():
                assert cache.gpu_kernels is not None
                attend_paged = cache.gpu_kernels.attend
                attend_paged(layer.index, qkv[rows], kv.numbers, kv.scales, call.which, out[rows])
            case Decodes() if kernels is not None:
                kernels.attend_decodes[layer.index](
                    qkv[rows],
                    rotation[0][rows],
                    rotation[1][rows],
                    kv.numbers,
                    call.tables,
                    call.positions,
                    out[rows],
                )
            case Decodes():
                mask = call.masks.within(layer.window)
                out[rows] = attend_decodes(query[rows], kv, call.tables, mask, layer)
            case FirstChunk() | LaterChunk():
                _attend_chunk(call, query[rows], key_value[rows], layer, cache, out[rows])
            case DecodesAgain():
                assert kernels is not None
                attend_again = kernels.attend_decodes[layer.index].attend_stored
                attend_again(qkv[rows], kv.numbers, call.tables, call.positions, out[rows])
    if inputs.num_padding:
        out[tokens:] = 0
    return out


def _store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    kv: LayerKV,
    cache: KVCache,
    inputs: AttentionInputs,
    head_norm: HeadNorm | None,
) -> None:
    """Norm and rotate queries and keys, store keys and values, and leave these as they will be read.

    So a chunk attends to its own tokens as to those before it, and it does not show where one begins. Rows of
    decodes are left alone where a kernel does all of theirs. On a GPU keys and values are read from the cache
    alone, those of this step as well.
    """
    shape, tokens = cache.shape, len(inputs.slots)
    if cache.rotate_and_store is not None:
        norms = None if head_norm is None else head_norm.query_and_key
        cache.rotate_and_store(qkv, rotation, inputs.slots, kv.numbers, kv.scales, norms)
        return
    if head_norm is not None:
        head_norm.norm_(qkv)
    if cache.kernels is None:
        num_query_heads = shape.num_kv_heads * cache.num_groups
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotate_(heads[:, : num_query_heads + shape.num_kv_heads], *rotation)
        assert inputs.place is not None
        own = heads[:tokens, num_query_heads:]
        as_read = kv.store(inputs.place, own)
        if cache.rounds:
            own.copy_(as_read)
    elif tokens > inputs.num_decodes:
        rows = slice(inputs.num_decodes, tokens)
        rotate_and_store = cache.kernels.rotate_and_store
        rotate_and_store(qkv[rows], rotation[0][rows], rotation[1][rows], inputs.slots[rows], kv.numbers)


def _attend_chunk(
    call: FirstChunk | LaterChunk,
    query: Tensor,
    own: Tensor,
    layer: AttentionLayer,
    cache: KVCache,
    out: Tensor,
) -> None:
    """query, own: the chunk's queries, and its keys and values, of [tokens, heads, head_dim]."""
    kernels, kv, block_size = cache.kernels, cache.layers[layer.index], cache.shape.block_size
    if kernels is not None and cache.by_products:
        if isinstance(call, FirstChunk):
            first_position, key_position = 0, 0
            by_head = whole_grains(own.transpose(0, 1), dim=1).contiguous()
        else:
            first_position = call.first_position
            first_block = first_block_seen(layer, first_position, block_size)
            key_position = first_block * block_size
            by_head = kernels.gather(kv.numbers, call.table[first_block:])
        key, value = by_head.chunk(2)
        softmax = kernels.softmax[layer.index]
        attend_chunk_by_products(query, (key, value), key_position, first_position, layer, softmax, out)
        return
    # PyTorch's own attention masks by itself what comes later.
    is_causal = isinstance(call, FirstChunk) and layer.window is None and layer.soft_cap is None
    if isinstance(call, FirstChunk):
        by_head = own.transpose(0, 1)
    elif kernels is None:
        by_head = kv.by_head(call.table, own.dtype)
    else:
        by_head = kernels.gather(kv.numbers, call.table)
    key, value = by_head.chunk(2)
    mask = None if is_causal else call.masks.within(layer.window)
    out.copy_(attend_sequence(query, key, value, mask, layer))

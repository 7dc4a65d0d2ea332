"""Attention of one sequence's chunk on a CPU, by batched products and a softmax kernel of our own.

In pieces that a processor's cache holds; `scaled_dot_product_attention` takes two to seven times as long
there, in float32 and, where oneDNN multiplies it, in bfloat16.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway_runtime.layers.attention_layer import AttentionLayer

if TYPE_CHECKING:
    from headway_runtime.kernels.cpu.softmax import CausalSoftmax

# Rows of a chunk that are attended to at once.
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


def attend_chunk_by_products(
    query: Tensor,
    key_value: tuple[Tensor, Tensor],
    key_position: int,
    first_position: int,
    layer: AttentionLayer,
    softmax: "CausalSoftmax",
    out: Tensor,
) -> None:
    """One sequence's chunk, some rows at a time, each against what lies before and among them in its window.

    query: [tokens, kv_heads, groups, head_dim].
    key_value: each [kv_heads, context, head_dim], and finite numbers up to a whole grain.
    key_position, first_position: of the first key and of the chunk's first row; that of the key is a whole
    number of grains, so that it does not show in the numbers where a chunk begins.
    out: [tokens, query heads * head_dim].
    """
    tokens, num_kv_heads, _, head_dim = query.shape
    key, value = key_value
    for start in range(0, tokens, CHUNK_ROWS):
        rows = whole_grains(query[start : start + CHUNK_ROWS], dim=0)
        num_rows = min(CHUNK_ROWS, tokens - start)
        end = first_position + start + num_rows
        first_key = layer.first_seen(first_position + start) // CHUNK_GRAIN * CHUNK_GRAIN
        seen = slice(first_key - key_position, min(end + -end % CHUNK_GRAIN - key_position, key.shape[1]))
        queries = rows.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        keys = key[:, seen].transpose(1, 2)
        scores = torch.baddbmm(queries.new_empty(()), queries, keys, beta=0, alpha=layer.scale)
        softmax(scores, first_position + start + 1 - first_key)
        attended = torch.bmm(scores, value[:, seen])
        by_head = attended.view(num_kv_heads, len(rows), -1).transpose(0, 1)
        out[start : start + num_rows].view(num_rows, num_kv_heads, -1).copy_(by_head[:num_rows])


def first_block_seen(layer: AttentionLayer, first_position: int, block_size: int) -> int:
    """The first block that a chunk has to have gathered: a whole number of grains of tokens lie before it."""
    grain = math.lcm(CHUNK_GRAIN, block_size)
    return layer.first_seen(first_position) // grain * grain // block_size


def whole_grains(x: Tensor, dim: int) -> Tensor:
    """`x` with zeros up to a whole grain along `dim`."""
    missing = -x.shape[dim] % CHUNK_GRAIN
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)

"""Attention over paged KV by PyTorch's operators: for GPUs, and for CPUs without kernels of our own."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.kv_numbers import LayerKV

# Scores that PyTorch's own attention cannot compute are held for so many rows at once.
CAPPED_ROWS = 128


def attend_decodes(query: Tensor, kv: LayerKV, tables: Tensor, mask: Tensor, layer: AttentionLayer) -> Tensor:
    """One token each. query: [sequences, kv_heads, groups, head_dim]; mask: [sequences, context]."""
    gathered = kv.by_head(tables.flatten(), query.dtype)
    gathered = gathered.view(len(gathered), len(tables), -1, query.shape[-1])
    key, value = (half.transpose(0, 1) for half in gathered.chunk(2))
    return _attended(query, key, value, mask[:, None, None], layer).reshape(query.shape[0], -1)


def attend_sequence(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: AttentionLayer
) -> Tensor:
    """One sequence's chunk. key, value: [kv_heads, context, head_dim]. Without a mask, causal from the start.

    The query heads that share a KV head become a batch dimension along which keys and values have stride 0,
    so that nothing is copied to repeat them.
    """
    tokens, _, num_groups, _ = query.shape
    queries = query.permute(2, 1, 0, 3)
    keys, values = (half.expand(num_groups, -1, -1, -1) for half in (key, value))
    if layer.soft_cap is None:
        attended = _attended(queries, keys, values, mask, layer)
    else:
        assert mask is not None
        pieces = zip(torch.split(queries, CAPPED_ROWS, dim=2), torch.split(mask, CAPPED_ROWS), strict=True)
        attended = torch.cat([_attended(rows, keys, values, own, layer) for rows, own in pieces], dim=2)
    return attended.permute(2, 1, 0, 3).reshape(tokens, -1)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: AttentionLayer
) -> Tensor:
    """[..., rows, head_dim] against [..., context, head_dim]."""
    if layer.soft_cap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=layer.scale
        )
    scores = query.float() @ key.float().transpose(-1, -2)
    scores = scores.mul_(layer.scale / layer.soft_cap).tanh_().mul_(layer.soft_cap)
    assert mask is not None
    return (scores.add_(mask).softmax(-1) @ value.float()).to(query.dtype)

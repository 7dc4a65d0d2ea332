"""What both attention kernels compute, by PyTorch's operators in float32, one sequence after the other."""

import math

import torch
from torch import Tensor

from headway_runtime.kernels.triton.paged_rows import PagedRows, Scoring


def reference_attention(
    query: Tensor,
    numbers: Tensor,
    scales: Tensor | None,
    which: PagedRows,
    scoring: Scoring,
    num_groups: int,
) -> Tensor:
    """Arguments as `paged_decode` has them. Returns float32 [rows, heads * head_dim]; 0 for nobody's."""
    _, num_planes, block_size, head_dim = numbers.shape
    num_kv_heads = num_planes // 2
    num_heads = num_kv_heads * num_groups
    out = torch.zeros((which.num_rows, num_heads * head_dim), device=query.device)
    starts, contexts = which.query_starts.tolist(), which.context_lengths.tolist()
    for sequence, context in enumerate(contexts):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0 or context == 0:
            continue
        table = which.tables[sequence, : -(-context // block_size)].long()
        wide = numbers[table].float()
        if scales is not None:
            wide = wide * scales[table].unsqueeze(-1)
        by_head = wide.transpose(0, 1).flatten(1, 2)[:, :context]
        key, value = by_head.repeat_interleave(num_groups, 0).chunk(2)
        own = query[rows, : num_heads * head_dim].float().view(num_queries, num_heads, head_dim)
        scores = torch.einsum("qhd,hkd->hqk", own, key) * scoring.scale
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
        position = torch.arange(context - num_queries, context, device=query.device).unsqueeze(1)
        seen = torch.arange(context, device=query.device)
        hidden = seen > position
        if scoring.window is not None:
            hidden |= seen <= position - scoring.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,hkd->qhd", weights, value).flatten(1)
    return out

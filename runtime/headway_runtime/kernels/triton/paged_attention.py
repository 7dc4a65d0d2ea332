"""Attention of a model's layers over its paged cache by the two kernels, with what they share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway_runtime.kernels.triton.attention_tiles import HeadShape
from headway_runtime.kernels.triton.paged_decode import make_workspace, paged_decode
from headway_runtime.kernels.triton.paged_prefill import paged_prefill
from headway_runtime.kernels.triton.paged_rows import (
    MOST_DECODED_TOKENS,
    SEQUENCE_CAPACITIES,
    PagedRows,
    Scoring,
    rows_for,
)


class PagedAttention:
    """Owns the workspace of decodes, which the layers use one after the other."""

    __slots__ = ("_scorings", "_workspace", "num_groups")

    def __init__(self, shape: HeadShape, scorings: Sequence[Scoring], device: torch.device) -> None:
        self.num_groups = shape.num_groups
        self._scorings = tuple(scorings)
        self._workspace = make_workspace(shape, MOST_DECODED_TOKENS, SEQUENCE_CAPACITIES[-1], device)

    def attend(
        self, layer: int, query: Tensor, numbers: Tensor, scales: Tensor | None, which: PagedRows, out: Tensor
    ) -> None:
        """query: rotated rows, [rows, heads * head_dim and more]. numbers, scales: the layer's cache."""
        scoring = self._scorings[layer]
        if rows_for(which.max_queries, self.num_groups) is None:
            paged_prefill(query, numbers, scales, which, scoring, self.num_groups, out)
        else:
            paged_decode(query, numbers, scales, which, scoring, self.num_groups, self._workspace, out)

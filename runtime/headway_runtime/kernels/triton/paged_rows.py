"""What attention kernels are told: which rows belong to whom, and how a layer attends. Knows no Triton."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

LOG2_E = 1.4426950408889634
# Numbers of sequences that kernels are compiled for; each is scanned whole by every program. With the last
# one decodes keep some of what they scanned in local memory.
SEQUENCE_CAPACITIES = (16, 128, 1024, 8192)
LEAST_ROWS = 16
# Tokens of a sequence that attend as decodes, and those times the query heads to a KV head; with more of
# either they are a prefill. One token always is a decode.
MOST_DECODED_TOKENS = 8
MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer attends; see layers/attention_layer.py."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def arguments(self) -> dict[str, Any]:
        """The kernels' arguments: what products of queries and keys are multiplied by, and masks."""
        factor, cap = self.scale, 1.0
        if self.soft_cap is not None:
            factor, cap = 2 * self.scale / self.soft_cap, self.soft_cap
        return {
            "score_factor": factor * LOG2_E,
            "soft_cap": cap * LOG2_E,
            "window": self.window or 0,
            "has_window": self.window is not None,
            "has_soft_cap": self.soft_cap is not None,
        }


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of a step whose sequences' keys and values are all in the cache, their own included.

    query_starts: int32 [sequences + 1], the first row of each, within the rows. A sequence may have none.
    context_lengths: int32 [sequences], tokens of each up to its last row's. 0: its rows get zeros, from the
        decode kernel; so a CUDA graph's sequences of nobody have one row and no context.
    tables: int32 [sequences, blocks], ids of its blocks; what is behind its last is not read.
    num_rows: of all sequences, at most. max_queries: of one sequence, at most.
    """

    query_starts: Tensor
    context_lengths: Tensor
    tables: Tensor
    num_rows: int
    max_queries: int

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)

    @property
    def sequence_capacity(self) -> int:
        """ValueError for more sequences than kernels are compiled for."""
        for capacity in SEQUENCE_CAPACITIES:
            if capacity >= self.num_sequences:
                return capacity
        raise ValueError(
            f"num_sequences={self.num_sequences!r} is above {SEQUENCE_CAPACITIES[-1]}; run fewer"
        )


def rows_for(max_queries: int, num_groups: int) -> int | None:
    """Of a decode's product, for so many tokens of a sequence; None where these are a prefill."""
    rows = max(LEAST_ROWS, 1 << (max_queries * num_groups - 1).bit_length())
    fits = max_queries <= MOST_DECODED_TOKENS and rows <= MOST_ROWS
    return rows if fits or max_queries == 1 else None


def used_rows_for(max_queries: int, num_groups: int) -> int:
    """What a decode's kernel is made for: one token a sequence, or as many as fit. More kinds are more
    kernels."""
    one = 1 << (num_groups - 1).bit_length()
    if max_queries == 1:
        return one
    return max(one, min(MOST_ROWS, 1 << (MOST_DECODED_TOKENS * num_groups - 1).bit_length()))


def least_prefilled_tokens(num_groups: int) -> int:
    """From how many tokens of a sequence on these are a prefill."""
    return next(count for count in range(2, MOST_DECODED_TOKENS + 2) if rows_for(count, num_groups) is None)

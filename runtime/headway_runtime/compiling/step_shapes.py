"""Shapes of steps that between them launch every kernel that a step of an engine needs. Arithmetic only.

Kernels are made for classes of what a step has, not for its numbers; a step of each class is one of these:

- Attention, for each number of sequences that kernels are made for: of one token each, of several, and of so
  many that they are a prefill. A step is at most one call of the former and one of the latter, each of which
  launches what it would alone.
- Products, for classes of rows. These are `row_products.ROW_CLASSES`, powers of two; a mixture's are those of
  rows of an expert, so each holds all rows between some number and twice that, and one power of two at least.
- Whether a product's inputs are split: with more rows of a class no longer, once they are not. So it takes
  the first rows of a class, or as many as one tile has, which is a power of two, and its last ones: of the
  last class those up to which codes are multiplied, and all that a step may have.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from headway_runtime.kernels.triton.paged_rows import SEQUENCE_CAPACITIES, least_prefilled_tokens


@dataclass(frozen=True, slots=True)
class StepLimits:
    """tokens: of all sequences. tokens_of_sequence: the longest that there may be."""

    sequences: int
    tokens: int
    tokens_of_sequence: int

    @property
    def most_rows(self) -> int:
        return min(self.tokens, self.sequences * self.tokens_of_sequence)


def step_shapes(limits: StepLimits, num_groups: int, last_rows: Iterable[int]) -> list[tuple[int, ...]]:
    """Of each step the tokens of its sequences; beside them it takes the largest step.

    num_groups: query heads to one KV head. last_rows: up to which products take codes.
    """
    attention = _attention_shapes(limits, num_groups)
    products = (_evenly(rows, limits) for rows in sorted(_product_rows(limits.most_rows, last_rows)))
    return list(dict.fromkeys((*attention, *products)))


def _attention_shapes(limits: StepLimits, num_groups: int) -> Iterator[tuple[int, ...]]:
    prefilled = least_prefilled_tokens(num_groups)
    # Several tokens are a decode where two are.
    kinds = (1, 2, prefilled) if prefilled > 2 else (1, prefilled)
    for before, _ in pairwise((0, *SEQUENCE_CAPACITIES)):
        count = before + 1
        for tokens in kinds:
            fits = count <= limits.sequences and count * tokens <= limits.tokens
            if fits and tokens <= limits.tokens_of_sequence:
                yield (tokens,) * count


def _product_rows(most_rows: int, last_rows: Iterable[int]) -> set[int]:
    doubled = {1 << power for power in range(most_rows.bit_length())}
    return {rows for rows in (*doubled, *last_rows) if 0 < rows <= most_rows}


def _evenly(rows: int, limits: StepLimits) -> tuple[int, ...]:
    """Of as few sequences as can have so many."""
    count = -(-rows // limits.tokens_of_sequence)
    share, more = divmod(rows, count)
    return (share,) * (count - more) + (share + 1,) * more

"""What programs of a decode leave for each other, and what whoever is last makes of it; see paged_decode.py.

A pair of a sequence and a head that lies in several stretches has as many parts. Each program has room for
two, the end of one pair and the beginning of another: float32 sums [used_rows, padded_dim], and a maximum and
a total of each row.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

# Of parts' sums that a program reads at once: 32 for each of 128 threads.
PARTS_NUMBERS: tl.constexpr = tl.constexpr(4096)
# Of a pair whose sums are more than that, pieces of so many are made one after the other: all 64 rows of a
# head of 128 took more registers than there are, where tiles themselves did not.
MERGED_NUMBERS: tl.constexpr = tl.constexpr(2048)


@triton.constexpr_function
def dims_merged_at_once(used_rows, padded_dim):
    """A power of two."""
    return padded_dim if used_rows * padded_dim <= PARTS_NUMBERS else MERGED_NUMBERS // used_rows


@triton.jit
def merged_parts(
    part_softmax,
    part_sums,
    first_program,
    num_parts,
    first_dim,
    used_rows: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    num_dims: tl.constexpr,
):
    """What a pair's parts come to, [used_rows, num_dims]: a piece of the head's numbers, from `first_dim` on.

    Reads take long, so several are done at once.
    """
    at_once: tl.constexpr = max(1, PARTS_NUMBERS // (used_rows * num_dims))
    row = tl.arange(0, used_rows)
    dims = first_dim + tl.arange(0, num_dims)
    maximum = tl.full((used_rows,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((used_rows,), dtype=tl.float32)
    sums = tl.zeros((used_rows, num_dims), dtype=tl.float32)
    for start in tl.range(0, num_parts, at_once):
        number = start + tl.arange(0, at_once)
        is_part = number < num_parts
        part = 2 * (first_program + number) + 1 - tl.minimum(number, 1)
        softmax_place = part_softmax + part[:, None] * (2 * used_rows) + row[None, :]
        is_row = is_part[:, None] & (row >= 0)[None, :]
        maxima = tl.load(softmax_place, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(softmax_place + used_rows, mask=is_row, other=0.0, cache_modifier=".cg")
        sums_place = part_sums + part.to(tl.int64)[:, None, None] * (used_rows * padded_dim)
        sums_place += row[None, :, None] * padded_dim + dims[None, None, :]
        is_number = is_part[:, None, None] & (dims < head_dim)[None, None, :]
        found = tl.load(sums_place, mask=is_number, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        shrink = tl.exp2(maximum - subtracted)
        weights = tl.exp2(maxima - subtracted[None, :])
        total = total * shrink + tl.sum(totals * weights, 0)
        sums = sums * shrink[:, None] + tl.sum(found * weights[:, :, None], 0)
        maximum = new_maximum
    return sums / tl.where(total > 0.0, total, 1.0)[:, None]


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What programs leave for each other; one serves all layers, as they run one after the other.

    arrivals: int32, zeros between launches.
    """

    softmax: Tensor
    sums: Tensor
    arrivals: Tensor

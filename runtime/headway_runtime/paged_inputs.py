"""Who attends to what, as the GPU's attention kernels are told: once per step, for all layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime.kernels.triton.paged_rows import PagedRows, rows_for
from headway_runtime.layers.attention import Paged

if TYPE_CHECKING:
    from headway_runtime.step_inputs import Rows

Integers32 = NDArray[numpy.int32]
Write = Callable[[Integers32], Tensor]


def num_paged_integers(num_sequences: int, blocks_per_sequence: int) -> int:
    """How many `paged_calls` writes at most: of two calls, each of three parts in whole fours."""
    return num_sequences * (blocks_per_sequence + 2) + 2 + 6 * 4


def few_tokens_first(order: list[int], chunks: "Sequence[Rows]", num_groups: int) -> tuple[list[int], int]:
    """The order of chunks that `paged_calls` takes, and how many of them attend as decodes."""
    few = [index for index in order if rows_for(chunks[index].num_tokens, num_groups) is not None]
    taken = set(few)
    return few + [index for index in order if index not in taken], len(few)


def paged_calls(chunks: "Sequence[Rows]", num_few: int, block_size: int, write: Write) -> Iterator[Paged]:
    """A call for the first `num_few` chunks, and one for the others. write: puts integers on the device."""
    start = 0
    for own in (chunks[:num_few], chunks[num_few:]):
        if not own:
            continue
        counts = [chunk.num_tokens for chunk in own]
        ends = [chunk.start + chunk.num_tokens for chunk in own]
        starts = numpy.zeros(len(own) + 1, dtype=numpy.int32)
        numpy.cumsum(counts, out=starts[1:])
        num_blocks = [-(-end // block_size) for end in ends]
        tables = numpy.zeros((len(own), max(num_blocks)), dtype=numpy.int32)
        for row, (chunk, count) in enumerate(zip(own, num_blocks, strict=True)):
            tables[row, :count] = chunk.block_table[:count]
        num_rows = sum(counts)
        which = PagedRows(
            write(starts), write(numpy.array(ends, dtype=numpy.int32)), write(tables), num_rows, max(counts)
        )
        yield Paged(start, start + num_rows, which)
        start += num_rows

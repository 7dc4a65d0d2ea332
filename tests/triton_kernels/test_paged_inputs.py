"""What a step tells the attention kernels: who has which rows, contexts and blocks, in two calls at most."""

from array import array

import numpy
import torch
from numpy.typing import NDArray

from headway_runtime.batch import Chunk
from headway_runtime.paged_inputs import few_tokens_first, num_paged_integers, paged_calls
from headway_runtime.request import SamplingParams

BLOCK_SIZE = 16


def chunk(start: int, num_tokens: int, first_block: int) -> Chunk:
    known = start + num_tokens
    # Blocks reach past the last position computed here.
    table = array("q", range(first_block, first_block + known // BLOCK_SIZE + 2))
    return Chunk(
        "r", list(range(known)), start, num_tokens, table, 0, samples=True, sampling=SamplingParams()
    )


def written(values: NDArray[numpy.int32]) -> torch.Tensor:
    assert values.dtype == numpy.int32
    return torch.from_numpy(values.copy())


def test_sequences_with_few_tokens_are_one_call_and_the_others_another() -> None:
    chunks = [chunk(40, 1, 1), chunk(0, 30, 10), chunk(15, 1, 20), chunk(16, 5, 30), chunk(100, 9, 40)]

    order, num_few = few_tokens_first([0, 1, 2, 3, 4], chunks, num_groups=4)
    few, many = paged_calls([chunks[index] for index in order], num_few, BLOCK_SIZE, written)

    assert (order, num_few) == ([0, 2, 3, 1, 4], 3)
    assert (few.start, few.end, many.start, many.end) == (0, 7, 7, 46)
    assert few.which.query_starts.tolist() == [0, 1, 2, 7]
    assert few.which.context_lengths.tolist() == [41, 16, 21]
    assert few.which.tables.tolist() == [[1, 2, 3], [20, 0, 0], [30, 31, 0]]
    assert (few.which.num_rows, few.which.max_queries) == (7, 5)
    assert many.which.query_starts.tolist() == [0, 30, 39]
    assert many.which.context_lengths.tolist() == [30, 109]
    assert many.which.tables.tolist() == [[10, 11, 0, 0, 0, 0, 0], [40, 41, 42, 43, 44, 45, 46]]


def test_tokens_are_too_many_for_decodes_where_their_heads_are() -> None:
    chunks = [chunk(0, 8, 1), chunk(0, 1, 2)]

    assert few_tokens_first([0, 1], chunks, num_groups=8) == ([0, 1], 2)
    assert few_tokens_first([0, 1], chunks, num_groups=9) == ([1, 0], 1)
    assert few_tokens_first([0, 1], chunks, num_groups=100) == ([1, 0], 1)


def test_the_integers_fit_what_is_set_aside_for_them() -> None:
    longest, num_sequences = 64, 6
    chunks = [chunk(longest - 1, 1, 1)] * 3 + [chunk(longest - 20, 20, 1)] * 3
    sizes: list[int] = []

    def counted(values: NDArray[numpy.int32]) -> torch.Tensor:
        sizes.append(values.size + -values.size % 4)
        return written(values)

    list(paged_calls(chunks, 3, BLOCK_SIZE, counted))

    assert sum(sizes) <= num_paged_integers(num_sequences, longest // BLOCK_SIZE)

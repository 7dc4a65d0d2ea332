"""Single recorded steps over caches of random numbers: rows of nobody, tokens that the host does not know."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway_runtime.batch import Chunk
from headway_runtime.request import SamplingParams

VOCAB_SIZE, BLOCK_SIZE = 330, 16


class Case:
    """Sequences of some lengths in a cache of random numbers, their blocks in random order."""

    def __init__(self, driver: Any, lengths: list[int], generator: torch.Generator) -> None:
        self.graphs = driver.graphs
        runner = driver.engine._runner
        self.cache = runner._cache
        layers = self.cache.layers
        with torch.inference_mode():
            for layer in layers:
                layer.numbers.copy_(torch.randn(layer.numbers.shape, generator=generator))
        free = (torch.randperm(runner.num_blocks, generator=generator) + 1).tolist()
        self.chunks = []
        for number, length in enumerate(lengths):
            table = array("q", [free.pop() for _ in range(length // BLOCK_SIZE + 1)])
            tokens = torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator).tolist()
            sampling = SamplingParams(seed=number, temperature=0.7 * (number % 2))
            self.chunks.append(
                Chunk(str(number), tokens, length, 1, table, 1, samples=True, sampling=sampling)
            )

    def tokens(self, before: Tensor | None = None, sources: dict[int, int] | None = None) -> list[int]:
        with torch.inference_mode():
            samples = self.graphs.launch(self.chunks, before, sources or {}).read()
        return [sample.token_id if sample.token_id is not None else -1 for sample in samples]

    def slots(self) -> set[tuple[int, int]]:
        return {(one.block_table[one.start // BLOCK_SIZE], one.start % BLOCK_SIZE) for one in self.chunks}


@pytest.fixture
def case(start: Callable[..., Any], generator: torch.Generator) -> Callable[[list[int]], Case]:
    driver = start(cuda_graph_sizes=(1, 6))
    return lambda lengths: Case(driver, lengths, generator)


def test_rows_of_nobody_store_nothing(case: Callable[[list[int]], Case]) -> None:
    own = case([17, 3, 40])
    before = own.cache.data.clone().view(torch.float32)

    own.tokens()

    shape = own.cache.layers[0].numbers.shape
    changed = (own.cache.data.view(torch.float32) != before).view(-1, *shape)
    places = {(block, offset) for _, block, _, offset, _ in changed.nonzero().tolist()}
    assert places == own.slots()


def test_each_row_is_computed_as_it_would_be_alone(case: Callable[[list[int]], Case]) -> None:
    own = case([17, 3, 40, 0])
    all_chunks = own.chunks
    together = own.tokens()

    alone = []
    for chunk in all_chunks:
        own.chunks = [chunk]
        alone += own.tokens()

    assert together == alone


def test_tokens_of_the_step_before_are_taken_where_they_lie(case: Callable[[list[int]], Case]) -> None:
    own = case([17, 3, 40])
    want = own.tokens()
    known = [chunk.token_ids[-1] for chunk in own.chunks]
    # In another order, and with one that nobody computes.
    before = torch.tensor([known[2], 300, known[0]])
    for chunk in (own.chunks[0], own.chunks[2]):
        chunk.token_ids[-1] = -1

    assert own.tokens(before, {0: 2, 2: 0}) == want


def test_a_recorded_step_feeds_the_next_one(case: Callable[[list[int]], Case]) -> None:
    own = case([17, 3, 40])
    with torch.inference_mode():
        first = own.graphs.launch(own.chunks)
    sampled = [sample.token_id for sample in first.read()]
    before = [replace(one, token_ids=list(one.token_ids)) for one in own.chunks]
    # A sequence has left, and the others have a token more.
    own.chunks = [own.chunks[2], own.chunks[0]]
    for chunk, token in zip(own.chunks, (sampled[2], sampled[0]), strict=True):
        chunk.token_ids.append(token)
        chunk.start += 1
    want = own.tokens()
    # That launch wrote tokens of its own, so they are given again.
    for chunk in own.chunks:
        chunk.token_ids[-1] = -1

    assert own.tokens(first.tokens, {0: 2, 1: 0}) == want
    # One behind the other, as steps are launched, nothing is copied in between.
    with torch.inference_mode():
        again = own.graphs.launch(before)
    assert own.tokens(again.tokens, {0: 2, 1: 0}) == want
    # What was read stays what it was.
    assert [sample.token_id for sample in first.read()] == sampled


def test_nothing_is_sampled_after_numbers_that_are_none(case: Callable[[list[int]], Case]) -> None:
    own = case([17, 3])
    with torch.inference_mode():
        for layer in own.cache.layers:
            layer.numbers[own.chunks[0].block_table[0]] = torch.nan

    first = own.tokens()
    assert first[0] == -1
    assert first[1] >= 0
    # The next step computes something for it, whatever it is, and the other row is as it would be.
    broken, whole = own.chunks
    whole.token_ids.append(first[1])
    whole.start += 1
    own.chunks = [whole]
    (want,) = own.tokens()
    own.chunks = [broken, whole]
    whole.token_ids[-1] = -1
    assert own.tokens(torch.tensor(first), {0: 0, 1: 1})[1] == want


def test_parameters_of_requests_that_left_are_forgotten(case: Callable[[list[int]], Case]) -> None:
    own = case([5, 9, 30, 20])
    chunks = own.chunks
    want = own.tokens()
    for kept in ([3], [1, 2], [0, 1, 2, 3], [2], [2, 3, 0], [0, 1, 2, 3]):
        own.chunks = [chunks[index] for index in kept]
        assert own.tokens() == [want[index] for index in kept]


def test_it_is_known_which_steps_are_recorded(case: Callable[[list[int]], Case]) -> None:
    own = case([5, 9])
    takes, (first, second) = own.graphs.takes, own.chunks
    assert takes(own.chunks)
    assert takes([first])
    assert not takes([first] * 7)

    def changed(**fields: Any) -> Chunk:
        return replace(second, **fields)

    assert not takes([first, changed(num_tokens=2)])
    assert not takes([first, changed(samples=False)])
    assert not takes([first, changed(ahead=(4,))])
    assert not takes([first, changed(adapter=1)])
    assert not takes([first, changed(sampling=SamplingParams(num_logprobs=0))])
    stops = SamplingParams(min_tokens=2, stop_token_ids=frozenset({4}))
    assert takes([first, changed(sampling=stops, num_generated=2)])
    assert not takes([first, changed(sampling=stops, num_generated=1)])

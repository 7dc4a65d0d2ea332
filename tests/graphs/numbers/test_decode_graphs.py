"""Single recorded steps over caches of random numbers: rows of nobody, tokens that the host does not know."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway_runtime.batch import Chunk
from headway_runtime.config import Envelope, Limits, SpeculativeConfig
from headway_runtime.graphs.forms import StepForm
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
            table = array("q", [free.pop() for _ in range(length // BLOCK_SIZE + 2)])
            tokens = torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator).tolist()
            sampling = SamplingParams(seed=number, temperature=0.7 * (number % 2))
            self.chunks.append(
                Chunk(str(number), tokens, length, 1, table, 1, samples=True, sampling=sampling)
            )

    def launch(self, before: Tensor | None = None, sources: dict[int, int] | None = None) -> Any:
        form = self.graphs.form_for(self.chunks)
        params = [one.sampling for one in self.chunks for _ in range(one.num_tokens)]
        with torch.inference_mode():
            self.graphs.replay(self.chunks, form, before, sources or {}, params)
            return self.graphs.samples(params)

    def tokens(self, before: Tensor | None = None, sources: dict[int, int] | None = None) -> list[int]:
        samples = self.launch(before, sources).read()
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
    first = own.launch()
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
    after, own.chunks = own.chunks, before
    again = own.launch()
    own.chunks = after
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


def test_it_is_known_what_each_step_is_recorded_as(
    start: Callable[..., Any], generator: torch.Generator
) -> None:
    driver = start(cuda_graph_sizes=(1, 6))
    own = Case(driver, [5, 9], generator)
    form_for, (first, second) = own.graphs.form_for, own.chunks

    def changed(**fields: Any) -> Chunk:
        return replace(second, **fields)

    wants_more = [first, changed(sampling=SamplingParams(num_logprobs=0))]
    stops = SamplingParams(min_tokens=2, stop_token_ids=frozenset({4}))
    assert form_for(own.chunks) == StepForm(6)
    assert form_for([first]) == StepForm(1)
    assert form_for([first, changed(sampling=stops, num_generated=2)]) == StepForm(6)
    # Not recorded yet.
    assert form_for(wants_more) is None
    driver.record_all()
    assert form_for(wants_more) == StepForm(6, draws=False)
    assert form_for([first, changed(sampling=stops, num_generated=1)]) == StepForm(6, draws=False)
    for none_such in (
        [first] * 7,
        [first, changed(num_tokens=2)],
        [first, changed(samples=False)],
        [first, changed(adapter=1)],
        # Nobody guesses here.
        [first, changed(num_tokens=2, ahead=(4,), num_generated=2)],
    ):
        assert form_for(none_such) is None


@pytest.fixture
def guessing(start: Callable[..., Any]) -> Any:
    """An engine that checks up to 3 guesses, with what is recorded before the first request."""
    limits = {"envelope": Envelope(6, 64, 3), "limits": Limits(6, 64, 3), "cuda_graph_sizes": (2, 4)}
    return start(speculative=SpeculativeConfig("ngram", adaptive=False), **limits)


def with_guesses(chunk: Chunk, *ahead: int) -> Chunk:
    count = len(ahead)
    return replace(chunk, num_tokens=1 + count, ahead=ahead, num_generated=chunk.num_generated + count)


def test_it_is_known_what_steps_with_guesses_are_recorded_as(
    guessing: Any, generator: torch.Generator
) -> None:
    own = Case(guessing, [5, 9], generator)
    form_for, (first, second) = own.graphs.form_for, own.chunks
    assert form_for(own.chunks) == StepForm(2)
    assert form_for([first, with_guesses(second, 4)]) == StepForm(8, has_several=True)
    assert form_for([with_guesses(first, 1, 2, 3), with_guesses(second, 1, 2, 3)]) == StepForm(8, True)
    assert form_for([with_guesses(first, 1, 2, 3)] * 3) == StepForm(16, has_several=True)
    # More than attend as decodes.
    assert form_for([with_guesses(first, *range(8))]) is None
    guessing.record_all()
    # Before the first guess the stop token is forbidden, behind the second it is not.
    stops = SamplingParams(min_tokens=3, stop_token_ids=frozenset({4}))
    unlike = with_guesses(replace(first, sampling=stops, num_generated=1), 7, 8)
    assert form_for([unlike]) == StepForm(8, True, draws=False)
    assert form_for([replace(unlike, num_generated=5)]) == StepForm(8, has_several=True)


def test_guesses_are_followed_by_what_would_follow_them_one_by_one(
    guessing: Any, generator: torch.Generator
) -> None:
    own = Case(guessing, [17, 3, 14, 40], generator)
    plain = own.chunks
    # Of several lengths, into a next block, and none for one of them.
    guesses = [[9, 8, 7], [], [200, 11, 5], [3]]
    want = []
    for chunk, ahead in zip(plain, guesses, strict=True):
        for count in range(1 + len(ahead)):
            known = [*chunk.token_ids, *ahead[:count]]
            own.chunks = [replace(chunk, token_ids=known, start=chunk.start + count, num_generated=1 + count)]
            want += own.tokens()

    own.chunks = [with_guesses(one, *ahead) for one, ahead in zip(plain, guesses, strict=True)]

    assert own.tokens() == want
    # And with other rows of nobody behind them than before.
    own.chunks = own.chunks[:2]
    assert own.tokens() == want[:5]


def test_rows_of_nobody_behind_guesses_store_nothing(guessing: Any, generator: torch.Generator) -> None:
    own = Case(guessing, [17, 3], generator)
    own.chunks = [with_guesses(own.chunks[0], 5, 6), own.chunks[1]]
    before = own.cache.data.clone().view(torch.float32)

    own.tokens()

    shape = own.cache.layers[0].numbers.shape
    changed = (own.cache.data.view(torch.float32) != before).view(-1, *shape)
    places = {(block, offset) for _, block, _, offset, _ in changed.nonzero().tolist()}
    (first, second) = own.chunks
    want = {(first.block_table[(17 + more) // BLOCK_SIZE], (17 + more) % BLOCK_SIZE) for more in range(3)}
    assert places == want | {(second.block_table[0], 3)}

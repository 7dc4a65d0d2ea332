"""Biases, penalties, forbidden tokens and min-p against a plain reference in double precision."""

import math
from array import array
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_runtime.batch import Chunk, Sample
from headway_runtime.request import SamplingParams
from headway_runtime.sampler import Sampler

CPU = torch.device("cpu")
VOCAB_SIZE = 24


def chunk(prompt: list[int], generated: list[int], **params: Any) -> Chunk:
    known = prompt + generated
    return Chunk(
        "a",
        known,
        len(known) - 1,
        1,
        array("q"),
        len(generated),
        samples=True,
        sampling=SamplingParams(**params),
    )


def edited(logits: torch.Tensor, one: Chunk) -> list[float]:
    """What the documented order of operations makes of one row of logits, token by token."""
    sampling = one.sampling
    generated = one.token_ids[len(one.token_ids) - one.num_generated :]
    biases = dict(sampling.logit_bias)
    values = []
    for token, value in enumerate(logits.double().tolist()):
        value += biases.get(token, 0.0)
        if token in one.token_ids:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= sampling.frequency_penalty * generated.count(token)
        value -= sampling.presence_penalty * (token in generated)
        values.append(value)
    allowed = set(range(len(values)))
    if sampling.allowed_token_ids is not None:
        allowed &= sampling.allowed_token_ids
    for *others, last in sampling.bad_words:
        if generated[len(generated) - len(others) :] == others:
            allowed = allowed - {last}
    if one.num_generated < sampling.min_tokens:
        allowed = allowed - sampling.stop_token_ids or allowed
    return [value if token in allowed else -math.inf for token, value in enumerate(values)]


def distribution(
    values: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> list[float]:
    """Temperature, min-p, top-k, top-p, by the book."""
    largest = max(values)
    weights = [math.exp((value - largest) / temperature) for value in values]
    weights = [weight if weight >= min_p else 0.0 for weight in weights]
    order = sorted(range(len(values)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, set()
    for token in kept:
        if mass >= top_p * total:
            break
        nucleus.add(token)
        mass += weights[token]
    return [weight / mass if token in nucleus else 0.0 for token, weight in enumerate(weights)]


def tokens_of(samples: list[Sample]) -> list[int]:
    assert all(one.token_id is not None for one in samples), samples
    return [one.token_id for one in samples if one.token_id is not None]


def assert_follows(tokens: list[int], want: list[float]) -> None:
    """Total variation distance: at most twice what chance alone makes of it on average."""
    seen = numpy.bincount(tokens, minlength=len(want)) / len(tokens)
    assert all(want[token] > 0 for token in set(tokens)), "a token outside the allowed set was drawn"
    distance = 0.5 * float(numpy.abs(seen - numpy.array(want)).sum())
    chance = 0.5 * sum(math.sqrt(2 * share * (1 - share) / (math.pi * len(tokens))) for share in want)
    # And room for a rare token that is seen once or twice.
    assert distance <= 2.0 * chance + 2.0 / len(tokens)


def logits_of(seed: int, rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * scale


TOKENS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5).map(
            lambda bias: tuple(bias.items())
        ),
        "allowed_token_ids": st.frozensets(TOKENS, min_size=1),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.frozensets(TOKENS, max_size=4),
    },
)
SEQUENCES = st.tuples(st.lists(TOKENS, min_size=1, max_size=8), st.lists(TOKENS, max_size=8), PARAMS)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(SEQUENCES, min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_greedy_rows_take_the_best_of_the_edited_logits(
    sequences: list[tuple[list[int], list[int], dict[str, Any]]], seed: int, dtype: str
) -> None:
    chunks = [chunk(prompt, generated, temperature=0.0, **params) for prompt, generated, params in sequences]
    logits = logits_of(seed, len(chunks)).to(getattr(torch, dtype))
    before = logits.clone()
    samples = Sampler(VOCAB_SIZE, CPU)(logits, chunks)
    for row, sample, one in zip(logits, samples, chunks, strict=True):
        values = edited(row.float(), one)
        if max(values) == -math.inf:
            assert (sample.token_id, sample.error_param) == (None, "bad_words")
        else:
            assert sample.token_id is not None
            assert values[sample.token_id] >= max(values) - 1e-4
    assert torch.equal(before, logits), "the model's logits were changed"


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"presence_penalty": 1.2}, id="presence"),
        pytest.param({"frequency_penalty": 0.7}, id="frequency"),
        pytest.param({"frequency_penalty": -0.5, "presence_penalty": -0.5}, id="encouraged"),
        pytest.param({"repetition_penalty": 1.6}, id="repetition"),
        pytest.param({"repetition_penalty": 0.7, "frequency_penalty": 0.4}, id="repetition and frequency"),
        pytest.param({"logit_bias": ((3, 2.5), (4, -4.0), (0, -100.0))}, id="bias"),
        pytest.param({"allowed_token_ids": frozenset({1, 5, 9, 20})}, id="allowed"),
        pytest.param({"bad_words": ((3,), (4, 5, 1), (5, 2), (4, 9), (3, 5, 8))}, id="bad words"),
        pytest.param({"min_p": 0.1}, id="min-p"),
        pytest.param({"min_p": 0.02, "top_k": 9, "top_p": 0.8, "temperature": 1.4}, id="all filters"),
        pytest.param({"min_p": 0.3, "top_p": 0.5}, id="min-p before top-p"),
        pytest.param({"min_tokens": 9, "stop_token_ids": frozenset({2, 7})}, id="min-tokens"),
        pytest.param(
            {
                "repetition_penalty": 1.3,
                "presence_penalty": 0.5,
                "logit_bias": ((2, 3.0),),
                "min_p": 0.05,
                "temperature": 0.7,
            },
            id="together",
        ),
    ],
)
def test_draws_follow_the_distribution_of_the_edited_logits(params: dict[str, Any]) -> None:
    count = 6000
    prompt, generated = [1, 2, 2, 3], [2, 4, 4, 4, 5]
    logits = logits_of(11, scale=1.5)[0]
    chunks = [chunk(prompt, generated, seed=seed, **params) for seed in range(count)]
    one = chunks[0]
    sampling = one.sampling
    want = distribution(
        edited(logits, one), sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p
    )
    assert_follows(tokens_of(Sampler(VOCAB_SIZE, CPU)(logits.expand(count, -1), chunks)), want)


def test_penalties_are_counted_on_and_after_a_pause_from_the_tokens_again() -> None:
    """One sampler sees a sequence grow, lose its place in the batch and come back, among others."""
    sampler = Sampler(VOCAB_SIZE, CPU)
    params = {
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "temperature": 0.0,
    }
    growing, other = chunk([1, 2], [], **params), chunk([3], [], **params)
    for step in range(120):
        present = [one for one, leaves in ((growing, step % 7 == 3), (other, step % 5 == 0)) if not leaves]
        if not present:
            continue
        logits = logits_of(step, len(present), scale=0.5)
        for row, one, token in zip(logits, present, tokens_of(sampler(logits, present)), strict=True):
            values = edited(row, one)
            assert values[token] >= max(values) - 1e-4
            one.token_ids.append(token)
            one.num_generated += 1
    assert len(set(growing.token_ids)) > 20, "the penalties drove it nowhere"


def test_a_large_batch_counts_more_different_tokens_than_there_was_room_for() -> None:
    vocab_size = 4000
    sampler = Sampler(vocab_size, CPU)
    one = chunk(list(range(1500)), list(range(1500, 1900)), repetition_penalty=1e6, temperature=0.0)
    logits = torch.ones(1, vocab_size)
    seen = set(one.token_ids)
    for _ in range(300):
        (token,) = tokens_of(sampler(logits, [one]))
        assert token not in seen
        seen.add(token)
        one.token_ids.append(token)
        one.num_generated += 1


def test_stop_tokens_are_allowed_before_min_tokens_where_nothing_else_is() -> None:
    stops = frozenset({3, 4})
    rows = [
        chunk([1], [], min_tokens=5, stop_token_ids=stops, allowed_token_ids=frozenset({3}), temperature=0.0),
        chunk(
            [1], [], min_tokens=5, stop_token_ids=stops, allowed_token_ids=frozenset({3, 8}), temperature=0.0
        ),
        chunk([1], [2] * 5, min_tokens=5, stop_token_ids=stops, temperature=0.0),
    ]
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 3] = 9.0
    assert tokens_of(Sampler(VOCAB_SIZE, CPU)(logits, rows)) == [3, 8, 3]


def test_min_tokens_ends_in_a_batch_that_stays_the_same() -> None:
    sampler = Sampler(4, CPU)
    one = chunk([1], [], min_tokens=2, stop_token_ids=frozenset({0}), temperature=0.0)
    other = chunk([1], [], temperature=0.0)
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0]] * 2)
    got = []
    for _ in range(4):
        tokens = tokens_of(sampler(logits, [one, other]))
        got.append(tokens)
        for sequence, token in zip((one, other), tokens, strict=True):
            sequence.token_ids.append(token)
            sequence.num_generated += 1
    assert got == [[1, 0], [1, 0], [0, 0], [0, 0]]


def test_logprobs_do_not_see_the_edits() -> None:
    logits = logits_of(5, 2)
    rows = [
        chunk([1], [2, 2], num_logprobs=3, temperature=0.0, frequency_penalty=2.0, logit_bias=((4, 50.0),)),
        chunk([1], [2], num_logprobs=3, allowed_token_ids=frozenset({6}), min_p=0.2),
    ]
    want = logits.log_softmax(-1)
    first, second = Sampler(VOCAB_SIZE, CPU)(logits, rows)
    assert (first.token_id, second.token_id) == (4, 6)
    for row, sample in zip(want, (first, second), strict=True):
        assert sample.logprobs is not None
        assert sample.token_id is not None
        assert sample.logprobs.chosen == pytest.approx(float(row[sample.token_id]), abs=1e-5)
        assert [token for token, _ in sample.logprobs.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits_do_not_hide_what_is_not_finite(temperature: float) -> None:
    logits = logits_of(6, 2)
    logits[0] = math.nan
    rows = [chunk([1], [2], frequency_penalty=1.0, temperature=temperature)] * 2
    first, second = Sampler(VOCAB_SIZE, CPU)(logits, rows)
    assert (first.token_id, first.error) == (None, None)
    assert second.token_id is not None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_seed_gives_the_same_token_alone_and_in_a_crowd_of_all_kinds(data: st.DataObject) -> None:
    filters = st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]), "seed": st.integers(-(2**62), 2**63 - 1)},
        optional={
            "top_k": st.integers(1, 40),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.floats(0.0, 0.5),
            "num_logprobs": st.integers(0, 3),
        },
    )
    sequences = data.draw(st.lists(st.tuples(SEQUENCES, filters), min_size=2, max_size=12))
    chunks = [chunk(prompt, generated, **(params | more)) for (prompt, generated, params), more in sequences]
    logits = logits_of(data.draw(st.integers(0, 2**31)), len(chunks)).bfloat16()
    together = Sampler(VOCAB_SIZE, CPU)(logits, chunks)
    order = data.draw(st.permutations(range(len(chunks))))
    shuffled = Sampler(VOCAB_SIZE, CPU)(logits[list(order)], [chunks[index] for index in order])
    for index, one in enumerate(chunks):
        (alone,) = Sampler(VOCAB_SIZE, CPU)(logits[index : index + 1], [one])
        assert alone.token_id == together[index].token_id == shuffled[order.index(index)].token_id


def test_equal_requests_that_are_different_objects_share_no_state() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=5.0)
    sampler = Sampler(3, CPU)
    logits = torch.tensor([[1.0, 0.5, 0.0]] * 2)
    first, second = chunk([1], [0]), chunk([1], [1])
    first.sampling, second.sampling = params, replace(params)
    assert tokens_of(sampler(logits, [first, second])) == [1, 0]
    assert tokens_of(sampler(logits, [second, first])) == [0, 1]

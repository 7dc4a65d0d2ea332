"""The sampler of GPUs against that of CPUs: the same samples of the same logits."""

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway_runtime.batch import UNREAD, Chunk, Sample
from headway_runtime.device_sampler import DeviceSampler
from headway_runtime.kernels.triton.edit_logits import EditedRows, edited, edited_by_torch
from headway_runtime.kernels.triton.top_logprobs import top_logprobs, top_logprobs_by_torch
from headway_runtime.layers import kernel_choice
from headway_runtime.logprobs import token_logprobs
from headway_runtime.request import SamplingParams
from headway_runtime.sampler import Sampler
from headway_runtime.token_feed import TokenFeed

CPU = torch.device("cpu")
VOCAB_SIZE = 330


def row(known: list[int], num_generated: int, **params: Any) -> Chunk:
    sampling = SamplingParams(**params)
    start = len(known) - 1
    return Chunk("a", known, start, 1, array("i"), num_generated, samples=True, sampling=sampling)


def batch() -> list[Chunk]:
    """Rows of every kind, some edited and some not."""
    return [
        row([5, 9, 9, 40], 2, seed=1),
        row([5, 9, 9, 40], 3, temperature=0.0, repetition_penalty=1.7, num_logprobs=0),
        row([7, 7, 7, 8, 9], 4, seed=3, frequency_penalty=0.7, presence_penalty=-0.4, top_k=30),
        row([1, 2], 1, temperature=0.0, num_logprobs=3),
        row([1, 2, 3], 2, seed=5, logit_bias=((3, 4.0), (2, -2.0), (329, 3.5)), repetition_penalty=1.2),
        row([1, 2, 3], 1, seed=6, allowed_token_ids=frozenset({4, 31, 32, 64, 329, 500}), num_logprobs=5),
        row([1, 2, 3], 1, seed=7, min_tokens=3, stop_token_ids=frozenset({0, 11, 400}), top_p=0.9),
        row([1], 1, seed=8, min_tokens=3, stop_token_ids=frozenset({4}), allowed_token_ids=frozenset({4, 6})),
        row([1], 1, seed=9, min_tokens=3, stop_token_ids=frozenset({4}), allowed_token_ids=frozenset({4})),
        row([1], 1, seed=9, allowed_token_ids=frozenset({1000})),
        row([3, 3], 1, seed=10, min_p=0.2, temperature=1.4),
        row([3, 5, 6], 2, seed=11, bad_words=((7,), (5, 6, 9), (6, 329), (3, 5, 6, 8)), temperature=0.0),
        row([3, 5], 1, seed=12, bad_words=((4,), (5, 6)), allowed_token_ids=frozenset({4, 6, 8})),
        row([3, 5], 1, seed=12, bad_words=((4,), (5, 6)), allowed_token_ids=frozenset({4, 6})),
    ]


def assert_alike(got: list[Sample], want: list[Sample]) -> None:
    assert [(one.token_id, one.error, one.error_param) for one in got] == [
        (one.token_id, one.error, one.error_param) for one in want
    ]
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs is None or theirs.logprobs is None:
            continue
        assert mine.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-4)
        assert [token for token, _ in mine.logprobs.top] == [token for token, _ in theirs.logprobs.top]
        assert [value for _, value in mine.logprobs.top] == pytest.approx(
            [value for _, value in theirs.logprobs.top], abs=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_are_the_cpus_from_step_to_step(dtype: torch.dtype) -> None:
    chunks = batch()
    here, there = Sampler(VOCAB_SIZE, CPU), DeviceSampler(VOCAB_SIZE, CPU)
    for _ in range(3):
        # Without equals among the likeliest, whose order nobody promises.
        order = torch.rand(len(chunks), VOCAB_SIZE).argsort(dim=-1)
        logits = (order.float() / 16 - 10).to(dtype)
        want = here(logits, chunks)

        got = there(logits, chunks)

        assert_alike(got, want)
        for chunk, sample in zip(chunks, want, strict=True):
            chunk.token_ids.append(sample.token_id or 0)
            chunk.num_generated += 1


@pytest.mark.parametrize("sampler", [Sampler, DeviceSampler])
def test_a_token_that_nobody_has_read_counts_as_if_it_were(sampler: Any) -> None:
    """Of the prompt, of the answer, of neither, with a bias; and one that is none."""
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.2,
    }
    bias: dict[str, Any] = {"logit_bias": ((6, 0.5), (8, 0.25))}
    sampled = [9, 40, 6, 6, 8, -1]
    asked_of = [asked, asked, asked, asked | bias, bias, asked]
    beginnings = [[5, 9, 9, 40] for _ in sampled]
    before = [row(known, 2, **own) for known, own in zip(beginnings, asked_of, strict=True)]
    feed = TokenFeed()
    feed.keep(before, torch.tensor(sampled))
    logits = torch.randn(len(sampled), VOCAB_SIZE)
    logits[:, [5, 6, 8, 9, 40]] = 5.0 + torch.rand(len(sampled), 5)
    for known in beginnings:
        known.append(UNREAD)
    unread = [row(known, 3, **own) for known, own in zip(beginnings, asked_of, strict=True)]
    read = [
        row([5, 9, 9, 40] + ([token] if token >= 0 else []), 3 if token >= 0 else 2, **own)
        for token, own in zip(sampled, asked_of, strict=True)
    ]

    got = sampler(VOCAB_SIZE, CPU).launch(logits, unread, feed).read()

    assert got == sampler(VOCAB_SIZE, CPU)(logits, read)


def test_guesses_count_as_tokens_of_the_answer() -> None:
    chunk = row([5, 9], 1, temperature=0.0, frequency_penalty=1.0)
    chunk.ahead = (9, 3)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [3, 9, 20]] = torch.tensor([1.5, 1.9, 1.0])

    (got,) = DeviceSampler(VOCAB_SIZE, CPU)(logits, [chunk])

    assert got.token_id == 20


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    logits[0, 3], logits[2, 7] = math.nan, math.inf
    chunks = [
        row([1], 1, temperature=0.0, num_logprobs=2),
        row([1], 1, seed=4),
        row([1], 1, logit_bias=((1, 1.0),)),
    ]

    got = DeviceSampler(VOCAB_SIZE, CPU)(logits, chunks)

    assert [one.token_id is None for one in got] == [True, False, True]
    assert all(one.error is None for one in got)


class Grammar:
    """Stands in for a grammar that is at a place where these tokens follow."""

    error, param, unwanted_ids = None, "grammar", frozenset({2})

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = allowed

    @property
    def library_matcher(self) -> "Grammar":
        return self

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        import ctypes

        bits = bytearray(num_bytes)
        for token in self._allowed:
            bits[token // 8] |= 1 << token % 8
        ctypes.memmove(pointer, bytes(bits), num_bytes)


def test_grammars_and_lists_of_tokens_meet() -> None:
    from headway_runtime.request import Grammar as Asked

    chunks = []
    for allowed, listed in (
        ([2, 40, 41, 349], None),
        ([2], None),
        ([2, 50, 51], frozenset({51, 52})),
    ):
        chunk = row([1], 1, seed=2, grammar=Asked("json_object"), allowed_token_ids=listed)
        chunk.matcher = Grammar(allowed)  # type: ignore[assignment]
        chunks.append(chunk)
    logits = torch.randn(3, VOCAB_SIZE)

    got = DeviceSampler(VOCAB_SIZE, CPU)(logits, chunks)

    assert got == Sampler(VOCAB_SIZE, CPU)(logits, chunks)
    assert got[0].token_id in (40, 41)
    assert [one.token_id for one in got[1:]] == [2, 51]


def test_bits_behind_the_vocabulary_are_no_tokens() -> None:
    from headway_runtime.request import Grammar as Asked

    chunk = row([1], 1, seed=2, grammar=Asked("json_object"))
    chunk.matcher = Grammar([340])  # type: ignore[assignment]

    (got,) = DeviceSampler(VOCAB_SIZE, CPU)(torch.randn(1, VOCAB_SIZE), [chunk])

    assert got.token_id is None
    assert got.error is not None


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([-1, -1, -1], id="all tokens read"),
        pytest.param([2, 0, 2], id="one listed, two not"),
        pytest.param([-1, 1, 0], id="one that is none"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_edited_as_by_torch(dtype: torch.dtype, places: list[int]) -> None:
    logits = torch.randn(5, 5000).to(dtype)
    counts = [0, 700, 3]
    tokens = torch.cat([torch.randperm(5000)[:count] for count in counts]).int()
    rows = EditedRows(
        torch.tensor([4, 0, 2], dtype=torch.int32),
        torch.tensor([-1, 1, 0], dtype=torch.int32),
        torch.randint(-(1 << 31), 1 << 31, (2, -(-5000 // 32))).int(),
        torch.tensor([0, 0, 700, 703], dtype=torch.int32),
        tokens,
        torch.randn(703) * (torch.rand(703) < 0.5),
        torch.randint(-1, 4, (703,)).float(),
        torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.2, 0.6], [0.8, -0.1, 0.0]]),
        torch.tensor(places, dtype=torch.int32),
        torch.tensor([int(tokens[5]), -1, 4999]),
    )

    got = edited(logits, rows)

    assert torch.equal(got, edited_by_torch(logits, rows))
    known = replace(rows, unread_places=torch.full((3,), -1, dtype=torch.int32))
    changed = (edited(logits, known) != got).nonzero().tolist()
    assert {row for row, _ in changed} <= {row for row, place in enumerate(places) if place in (0, 2)}


@pytest.mark.parametrize(
    ("vocab_size", "num_top", "with_ranks"),
    [(600, 20, False), (97, 5, True), (1, 1, True), (2374, 0, True)],
    ids=str,
)
def test_logprobs_and_ranks_are_those_of_torch(
    vocab_size: int,
    num_top: int,
    with_ranks: bool,  # noqa: FBT001
) -> None:
    from headway_runtime.draws import block_size_of

    logits = torch.rand(4, vocab_size).argsort(dim=-1).float() / 9
    tokens = torch.randint(vocab_size, (4,))

    got = top_logprobs(logits, None, tokens, num_top, block_size_of(vocab_size), with_ranks=with_ranks)

    want = top_logprobs_by_torch(logits, tokens, num_top)
    torch.testing.assert_close(got.chosen, want.chosen)
    torch.testing.assert_close(got.logprobs, want.logprobs)
    assert torch.equal(got.tokens, want.tokens)
    if with_ranks:
        assert got.ranks is not None
        assert want.ranks is not None
        assert torch.equal(got.ranks, want.ranks)


def test_equals_are_told_in_the_order_of_tokens() -> None:
    logits = torch.zeros(1, 96)
    logits[0, [95, 2, 50]] = 1.0

    got = top_logprobs(logits, None, torch.tensor([3]), 5, 12)

    assert got.tokens.tolist() == [[2, 50, 95, 0, 1]]


def test_prompts_have_the_same_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.rand(3, 90).argsort(dim=-1).float() / 9
    want = token_logprobs(logits, [4, 80, 3], [2, 0, 5], with_ranks=True)
    monkeypatch.setattr(kernel_choice, "_choice", lambda: "triton")

    got = token_logprobs(logits, [4, 80, 3], [2, 0, 5], with_ranks=True)

    assert [one.rank for one in got] == [one.rank for one in want]
    assert [[token for token, _ in one.top] for one in got] == [
        [token for token, _ in one.top] for one in want
    ]
    assert [one.chosen for one in got] == pytest.approx([one.chosen for one in want], abs=1e-5)

"""Prompt lookup: what followed the same tokens before."""

from __future__ import annotations

import random
from array import array

import pytest

from headway_runtime import ngram_drafts
from headway_runtime.batch import Chunk
from headway_runtime.ngram_drafts import NgramDrafts
from headway_runtime.request import SamplingParams

SAMPLING = SamplingParams()


def chunk(tokens: list[int], num_drafts: int) -> Chunk:
    return Chunk("x", tokens, len(tokens) - 1, 1, array("q"), 1, True, SAMPLING, None, num_drafts)


def guess(tokens: list[int], num_drafts: int = 3, shortest: int = 1, longest: int = 3) -> tuple[int, ...]:
    return NgramDrafts(shortest, longest, 8).propose([chunk(tokens, num_drafts)])[0]


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        pytest.param([1, 2, 3, 4, 5, 1, 2], (3, 4, 5), id="what followed the last two tokens"),
        pytest.param([1, 9, 3, 4, 8, 2, 9], (3, 4, 8), id="what followed the last one, as two are nowhere"),
        pytest.param([1, 2, 7, 1, 2, 8, 1, 2], (8, 1, 2), id="the latest of several places"),
        pytest.param([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], (7, 6, 1), id="the longest match before the latest"),
        pytest.param([4, 4, 4, 4], (4, 4, 4), id="a token that repeats goes on"),
        pytest.param([1, 2, 1, 2, 1], (2, 1, 2), id="a pattern that repeats goes on past the end"),
        pytest.param([1, 2, 3, 4], (), id="nothing repeats"),
        pytest.param([1], (), id="a single token"),
    ],
)
def test_the_guess(tokens: list[int], want: tuple[int, ...]) -> None:
    assert guess(tokens) == want


def test_matches_shorter_than_asked_for_do_not_count() -> None:
    assert guess([1, 2, 3, 9, 2], shortest=2) == ()
    assert guess([1, 2, 3, 1, 2], shortest=2) == (3, 1, 2)


def test_it_goes_on_as_tokens_come_and_forgets_who_is_gone() -> None:
    drafts = NgramDrafts(1, 3, max_num_seqs=2)
    own = random.Random(3)
    lists = [[own.randrange(5) for _ in range(8)] for _ in range(4)]
    for _ in range(60):
        for tokens in lists:
            tokens.append(own.randrange(5))
        chosen = own.sample(lists, 2)
        found = drafts.propose([chunk(tokens, 4) for tokens in chosen])
        assert found == [guess(tokens, 4) for tokens in chosen]
    assert len(drafts._indices) == 2


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafts, "MOST_INDEXED_AT_ONCE", 10)
    tokens = [*range(100, 130), 7, 8, 9, *range(200, 220), 7, 8]
    drafts = NgramDrafts(2, 3, 8)
    found = [drafts.propose([chunk(tokens, 2)])[0] for _ in range(6)]
    assert found[0] == ()
    assert found[-1] == (9, 200)

"""The sampler against plain references: exact greedy, filters, distributions, and what a seed promises."""

import math
from array import array
from typing import Any

import pytest
import torch

from headway_runtime.batch import Chunk, Sample
from headway_runtime.request import SamplingParams
from headway_runtime.sampler import Sampler

CPU = torch.device("cpu")


# As many equal tokens, or a set as wide, as anything in the sampler that looks at some tokens first.
NUM_CANDIDATES = 32


def row(position: int = 0, num_generated: int = 0, **params: Any) -> Chunk:
    """A sequence whose next token goes to `position`."""
    known = [0] * position
    sampling = SamplingParams(**params)
    return Chunk(
        "a", known, max(0, position - 1), 1, array("q"), num_generated, samples=True, sampling=sampling
    )


def random_logits(seed: int, rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * scale


def tokens_of(samples: list[Sample]) -> list[int]:
    assert all(one.token_id is not None for one in samples)
    return [one.token_id for one in samples if one.token_id is not None]


def draws(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    """Tokens that one row of logits gives at `count` positions."""
    sampler = Sampler(logits.shape[-1], CPU)
    rows = [row(position=position, **params) for position in range(count)]
    return tokens_of(sampler(logits.expand(count, -1), rows))


def reference_distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k, then top-p, each by the book: sorted lists in double precision."""
    scores = [value / temperature for value in logits.double().tolist()]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = order[:top_k] if top_k else order
    largest = scores[order[0]]
    total = sum(math.exp(scores[token] - largest) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += math.exp(scores[token] - largest) / total
        if mass >= top_p:
            break
    total = sum(math.exp(scores[token] - largest) for token in nucleus)
    return [
        math.exp(scores[token] - largest) / total if token in nucleus else 0.0 for token in range(len(scores))
    ]


def assert_follows(tokens: list[int], want: list[float]) -> None:
    """Chi-square over tokens that are expected at least five times, at about five standard deviations."""
    count = len(tokens)
    seen = torch.bincount(torch.tensor(tokens), minlength=len(want)).tolist()
    assert all(want[token] > 0 for token in set(tokens)), "a token outside the allowed set was drawn"
    common = [token for token, share in enumerate(want) if share * count >= 5]
    rest_want = 1.0 - sum(want[token] for token in common)
    rest_seen = count - sum(seen[token] for token in common)
    statistic = sum((seen[token] - want[token] * count) ** 2 / (want[token] * count) for token in common)
    if rest_want * count >= 5:
        statistic += (rest_seen - rest_want * count) ** 2 / (rest_want * count)
    degrees = max(1, len(common) - 1)
    assert statistic <= degrees + 5 * math.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_argmax(dtype: torch.dtype) -> None:
    logits = random_logits(1, 20, 500).to(dtype)
    samples = Sampler(500, CPU)(logits, [row(temperature=0.0) for _ in range(20)])
    assert tokens_of(samples) == logits.float().argmax(-1).tolist()
    assert all(one.logprobs is None for one in samples)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        pytest.param(1.0, 0, 1.0, id="plain"),
        pytest.param(0.5, 0, 1.0, id="cold"),
        pytest.param(2.5, 0, 1.0, id="hot"),
        pytest.param(1.0, 5, 1.0, id="top-k"),
        pytest.param(1.0, 1, 1.0, id="top-k of one"),
        pytest.param(1.0, 0, 0.7, id="top-p"),
        pytest.param(1.0, 0, 0.01, id="top-p of nearly nothing"),
        pytest.param(0.8, 12, 0.8, id="all three"),
        pytest.param(1.0, 10_000, 0.9, id="top-k beyond the vocabulary"),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(2, 1, 40, scale=1.5)[0]
    tokens = draws(logits, 6000, temperature=temperature, top_k=top_k, top_p=top_p, seed=17)
    assert_follows(tokens, reference_distribution(logits, temperature, top_k, top_p))


@pytest.mark.parametrize("count_by", ["seed", "position"])
def test_noise_is_fresh_for_every_seed_and_position(count_by: str) -> None:
    vocab_size, count = 16, 8000
    rows = [
        row(seed=index, position=3) if count_by == "seed" else row(seed=3, position=index)
        for index in range(count)
    ]
    tokens = tokens_of(Sampler(vocab_size, CPU)(torch.zeros(count, vocab_size), rows))
    assert_follows(tokens, [1 / vocab_size] * vocab_size)
    # Neither a pair of neighbours may hang together.
    pairs = [first * vocab_size + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_follows(pairs, [1 / vocab_size**2] * vocab_size**2)


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """Large noise comes from the finest part of the uniform numbers; coarse ones would starve the tail."""
    vocab_size = 2048
    logits = torch.full((vocab_size,), -8.0)
    logits[0] = 0.0
    share = (vocab_size - 1) * math.exp(-8.0) / (1 + (vocab_size - 1) * math.exp(-8.0))
    tokens = draws(logits, 1500, seed=5)
    seen = sum(token != 0 for token in tokens)
    assert abs(seen - 1500 * share) <= 4.5 * math.sqrt(1500 * share * (1 - share))
    want_distinct = (vocab_size - 1) * (1 - math.exp(-seen / (vocab_size - 1)))
    assert len(set(tokens) - {0}) == pytest.approx(want_distinct, rel=0.1)


def test_seed_gives_the_same_tokens_in_any_batch() -> None:
    vocab_size = 3000
    logits = random_logits(3, 6, vocab_size).bfloat16()
    rows = [
        row(position=10, seed=1),
        row(position=11, seed=2, temperature=0.7, top_k=50),
        row(position=12, seed=3, temperature=1.3, top_p=0.8),
        row(position=13, seed=4, temperature=0.0),
        row(position=14, seed=-5, top_k=2, top_p=0.5),
        row(position=15, seed=2**63 - 1, top_p=0.99999),
    ]
    sampler = Sampler(vocab_size, CPU)
    together = tokens_of(sampler(logits, rows))
    alone = [tokens_of(sampler(logits[index : index + 1], [one]))[0] for index, one in enumerate(rows)]
    backwards = tokens_of(sampler(logits.flip(0), rows[::-1]))[::-1]
    assert together == alone == backwards


def test_other_seeds_give_other_tokens() -> None:
    logits = torch.zeros(50)
    assert draws(logits, 40, seed=1) != draws(logits, 40, seed=2)
    assert draws(logits, 40, seed=1) == draws(logits, 40, seed=1)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (3, 0.9)])
def test_equal_logits_at_the_edge_are_all_kept(top_k: int, top_p: float) -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, -9.0])
    assert set(draws(logits, 400, top_k=top_k, top_p=top_p, seed=1)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.5), (40, 0.5)])
def test_more_equals_at_the_edge_than_candidates_are_all_kept(top_k: int, top_p: float) -> None:
    num_equal = 4 * NUM_CANDIDATES
    logits = torch.cat([torch.tensor([1.0]), torch.zeros(num_equal), torch.full((50,), -9.0)])
    kept = set(draws(logits, 2500, top_k=top_k, top_p=top_p, seed=3))
    assert kept <= set(range(num_equal + 1))
    assert len(kept) > 0.99 * num_equal


@pytest.mark.parametrize("top_k", [0, NUM_CANDIDATES - 1, NUM_CANDIDATES, NUM_CANDIDATES + 500, 2999])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
def test_filters_wider_than_the_candidates_equal_the_reference(top_k: int, top_p: float) -> None:
    """Nearly flat logits over many tokens: the sets are larger than what is looked through first."""
    vocab_size = 3000
    logits = random_logits(4, 1, vocab_size, scale=0.1)[0]
    want = reference_distribution(logits, 1.0, top_k, top_p)
    allowed = {token for token, share in enumerate(want) if share > 0}
    tokens = set(draws(logits, 600, top_k=top_k, top_p=top_p, seed=9))
    assert tokens <= allowed
    # All of the set is reached, not just its head: the lower half of it gets its share.
    ordered = sorted(allowed, key=lambda token: -float(logits[token]))
    assert len(tokens & set(ordered[len(ordered) // 2 :])) > 150 * min(1.0, len(allowed) / 1000)


def test_min_tokens_forbids_stop_tokens_until_reached() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0]] * 3)
    stops = frozenset({0, 1, 99})
    rows = [
        row(temperature=0.0, min_tokens=2, stop_token_ids=stops, num_generated=0),
        row(temperature=0.0, min_tokens=2, stop_token_ids=stops, num_generated=2),
        row(temperature=1.0, top_k=1, min_tokens=2, stop_token_ids=stops, num_generated=1),
    ]
    assert tokens_of(Sampler(4, CPU)(logits, rows)) == [2, 0, 2]
    assert logits[0].tolist() == [5.0, 4.0, 3.0, 0.0], "the model's logits were changed"


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(6, 3, 30)
    want = logits.log_softmax(-1)
    rows = [
        row(temperature=0.0, num_logprobs=0),
        row(temperature=0.2, top_k=4, seed=8, num_logprobs=5),
        row(temperature=1.0, seed=9),
    ]
    first, second, third = Sampler(30, CPU)(logits, rows)
    assert third.logprobs is None
    assert first.logprobs is not None
    assert first.logprobs.top == ()
    assert first.logprobs.chosen == pytest.approx(float(want[0].max()), abs=1e-5)
    assert second.logprobs is not None
    assert second.token_id is not None
    assert second.logprobs.chosen == pytest.approx(float(want[1, second.token_id]), abs=1e-5)
    values, tokens = want[1].topk(5)
    assert [token for token, _ in second.logprobs.top] == tokens.tolist()
    assert [value for _, value in second.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row_that_is_not_finite_gives_no_token_and_leaves_the_others_alone(bad: float) -> None:
    logits = random_logits(7, 4, 20)
    rows = [row(temperature=0.0), row(temperature=1.0), row(temperature=0.0), row(temperature=1.0)]
    want = tokens_of(Sampler(20, CPU)(logits, rows))
    logits[0, 3] = logits[1, 4] = bad
    samples = Sampler(20, CPU)(logits, rows)
    assert [one.token_id for one in samples] == [None, None, want[2], want[3]]

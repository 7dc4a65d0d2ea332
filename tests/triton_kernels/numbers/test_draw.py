"""Tokens drawn by kernels, against those that `draws.py` draws from the same logits, seeds and positions."""

import math
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

from headway_runtime.draws import LOWEST_TEMPERATURE, MASK_64, Drawer, block_size_of, split_mix
from headway_runtime.kernels.triton.draw import DrawParameters, draw
from headway_runtime.kernels.triton.vocabulary import block_numbers, block_numbers_by_torch
from headway_runtime.request import SamplingParams

CPU = torch.device("cpu")
FILTERS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "greedy": SamplingParams(temperature=0.0),
    "top-k": SamplingParams(top_k=5),
    "top-k 1": SamplingParams(top_k=1),
    "top-k of more than blocks": SamplingParams(top_k=70, temperature=2.0),
    "top-k of all": SamplingParams(top_k=100000),
    "top-p": SamplingParams(top_p=0.8),
    "top-p of nearly nothing": SamplingParams(top_p=1e-9),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(top_k=20, top_p=0.7, min_p=0.02, temperature=1.3),
}


def parameters_of(
    params: list[SamplingParams], positions: list[int], places: Tensor | None
) -> DrawParameters:
    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    seeds = numpy.array([split_mix(one.seed & MASK_64) for one in params], dtype=numpy.uint64)
    return DrawParameters(
        places,
        floats([one.temperature for one in params]),
        torch.tensor([one.top_k for one in params], dtype=torch.int32),
        floats([one.top_p for one in params]),
        floats([one.min_p for one in params]),
        torch.from_numpy(seeds.view(numpy.int64)),
        torch.tensor(positions),
    )


def by_kernel(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    tokens = torch.full((len(logits),), -7)
    found = parameters_of(params, positions, None)
    draw(logits, found, tokens, block_size_of(logits.shape[1]), reads_places=False)
    listed: list[int] = tokens.tolist()
    return listed


def by_drawer(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    tokens = torch.full((len(logits),), -1)
    drawn = []
    for row, one in enumerate(params):
        if one.temperature < LOWEST_TEMPERATURE:
            best, likeliest = logits[row].float().max(-1)
            tokens[row] = likeliest if bool(best.isfinite()) else -1
        else:
            drawn.append(row)
    drawer = Drawer(logits.shape[1], CPU)
    for part in drawer.plan(drawn, drawn, [params[row] for row in drawn]):
        own, times = drawer.draw(logits, part, numpy.array(positions, dtype=numpy.int64))
        tokens[part.places] = torch.where(times.isfinite(), own, -1)
    listed: list[int] = tokens.tolist()
    return listed


@pytest.mark.parametrize(
    ("name", "vocab_size", "dtype"),
    [
        *((name, 600, torch.float32) for name in FILTERS),
        *(("all", size, torch.bfloat16) for size in (97, 1, 2 * 1187)),
        *((name, 97, torch.bfloat16) for name in ("none", "top-k of more than blocks", "greedy")),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_cpu(name: str, vocab_size: int, dtype: torch.dtype) -> None:
    count = 8
    logits = (torch.randn(count, vocab_size) * torch.rand(count, 1) * 6).to(dtype)
    params = [replace(FILTERS[name], seed=int(torch.randint(1 << 62, ()))) for _ in range(count)]
    positions = torch.randint(0, 1 << 20, (count,)).tolist()

    got = by_kernel(logits, params, positions)

    assert got == by_drawer(logits, params, positions)


def test_rows_of_every_kind_share_a_launch() -> None:
    params = [replace(one, seed=number) for number, one in enumerate(FILTERS.values())]
    logits = torch.randn(len(params), 12 * 31) * 3
    positions = list(range(len(params)))

    assert by_kernel(logits, params, positions) == by_drawer(logits, params, positions)


def test_each_row_is_read_and_written_at_its_place() -> None:
    logits = torch.randn(7, 60) * 3
    params, positions = [SamplingParams(seed=3), SamplingParams(top_k=3, seed=4)], [8, 9]
    places = torch.tensor([5, 1], dtype=torch.int32)
    tokens = torch.full((7,), -7)

    draw(logits, parameters_of(params, positions, places), tokens, block_size_of(60), reads_places=True)

    want = by_drawer(logits[[5, 1]], params, positions)
    assert tokens.tolist() == [-7, want[1], -7, -7, -7, want[0], -7]


def test_many_equals_are_cut_by_passes_over_the_row() -> None:
    """Of more than fit side by side the k-th largest is found as well."""
    logits = torch.zeros(3, 6000)
    logits[:, ::7] = 1.0
    logits[1] = torch.randn(6000) - 2.0
    logits[2] = -3.0
    params = [SamplingParams(top_k=k, seed=k) for k in (100, 5000, 3)]

    assert by_kernel(logits, params, [1, 2, 3]) == by_drawer(logits, params, [1, 2, 3])


@pytest.mark.parametrize("name", ["none", "greedy", "all"])
def test_rows_without_finite_logits_have_no_token(name: str) -> None:
    logits = torch.randn(5, 96)
    logits[0, 40] = math.nan
    logits[1, 7] = math.inf
    logits[2] = -math.inf
    logits[3, 1:] = -math.inf

    tokens = by_kernel(logits, [FILTERS[name]] * 5, [0] * 5)

    assert tokens[:4] == [-1, -1, -1, 0]
    assert tokens[4] >= 0


def test_the_first_of_the_likeliest_is_taken() -> None:
    logits = torch.zeros(2, 77)
    logits[1, [30, 70]] = 2.0

    assert by_kernel(logits, [FILTERS["greedy"]] * 2, [0, 0]) == [0, 30]


@pytest.mark.parametrize("size", [(4, 30), (1, 97), (3, 2100)], ids=str)
def test_blocks_have_their_largest_and_their_sums(size: tuple[int, int]) -> None:
    num_blocks, block_size = size
    logits = torch.randn(3, num_blocks * block_size).to(torch.bfloat16)
    temperatures = torch.tensor([0.5, 1.0, 2.0])

    got = block_numbers(logits, None, temperatures, block_size)

    want = block_numbers_by_torch(logits, temperatures, block_size)
    assert torch.equal(got.tops, want.tops)
    torch.testing.assert_close(got.sums, want.sums, rtol=1e-5, atol=0.0)

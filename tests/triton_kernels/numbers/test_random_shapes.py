"""Kernels on shapes that nobody chose, each run on other ones; the seed is told by a test that fails."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from headway_runtime.draws import block_size_of
from headway_runtime.kernels.triton import coded_product
from headway_runtime.kernels.triton.attention_reference import reference_attention
from headway_runtime.kernels.triton.attention_tiles import HeadShape
from headway_runtime.kernels.triton.coded_product import CodedProduct
from headway_runtime.kernels.triton.coded_weight import Form, coded_weight
from headway_runtime.kernels.triton.draw import DrawParameters, draw
from headway_runtime.kernels.triton.paged_decode import make_workspace, paged_decode
from headway_runtime.kernels.triton.paged_prefill import paged_prefill
from headway_runtime.kernels.triton.paged_rows import MOST_DECODED_TOKENS, Scoring, rows_for
from headway_runtime.layers.kv_numbers import to_codes

CASES = range(12)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
One = TypeVar("One")


class Chooser:
    """Random choices, so that a seed is a case."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def number(self, low: int, high: int) -> int:
        """Up to `high`, which is included."""
        device = self._generator.device
        return int(torch.randint(low, high + 1, (), generator=self._generator, device=device))

    def one(self, *these: One) -> One:
        return these[self.number(0, len(these) - 1)]


@pytest.fixture
def chooser(generator: torch.Generator) -> Chooser:
    return Chooser(generator)


def scoring_of(chooser: Chooser) -> Scoring:
    window = chooser.one(None, chooser.number(1, 90))
    return Scoring(0.2, window, chooser.one(None, 4.0))


def paged_case(
    chooser: Chooser, make: Callable[..., Any], lengths: Sequence[tuple[int, int]], num_groups: int
) -> Any:
    dtype = chooser.one(torch.bfloat16, torch.float16, torch.float32)
    return make(
        lengths,
        num_kv_heads=chooser.number(1, 2),
        num_groups=num_groups,
        head_dim=8 * chooser.number(2, 17),
        block_size=chooser.one(8, 16, 32),
        dtype=dtype,
        kept=chooser.one(dtype, dtype, torch.int8, torch.float8_e4m3fn),
        num_free_rows=chooser.number(0, 2),
    )


def assert_attended(case: Any, want: torch.Tensor) -> None:
    """All rows of sequences, and no others."""
    end = int(case.which.query_starts[-1])
    tolerance = TOLERANCES[case.query.dtype]
    torch.testing.assert_close(case.out[:end].float(), want[:end], rtol=tolerance, atol=tolerance)
    assert bool(case.out[end:].isnan().all())


@pytest.mark.parametrize("number", CASES)
def test_decodes(number: int, chooser: Chooser, make_paged_case: Callable[..., Any]) -> None:
    num_groups = chooser.number(1, 12)
    fitting = [count for count in range(1, MOST_DECODED_TOKENS + 1) if rows_for(count, num_groups)]
    # Odd cases are of one token a sequence.
    most = 1 if number % 2 else max(fitting)
    lengths = []
    for _ in range(chooser.number(1, 4)):
        count = chooser.number(0, most)
        lengths.append((count, 0 if count == 0 else count + chooser.number(0, 130)))
    case = paged_case(chooser, make_paged_case, lengths, num_groups)
    num_planes, block_size, head_dim = case.numbers.shape[1:]
    shape = HeadShape(num_planes // 2, num_groups, head_dim, block_size)
    workspace = make_workspace(shape, case.which.max_queries, case.which.num_sequences, case.query.device)
    workspace.sums.fill_(torch.nan)
    scoring = scoring_of(chooser)
    want = reference_attention(case.query, case.numbers, case.scales, case.which, scoring, num_groups)

    arguments = (case.query, case.numbers, case.scales, case.which, scoring, num_groups)
    paged_decode(*arguments, workspace, case.out)

    assert_attended(case, want)
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("number", CASES)
def test_prefills(number: int, chooser: Chooser, make_paged_case: Callable[..., Any]) -> None:
    lengths = []
    for _ in range(1 + number % 3):
        count = chooser.number(0, 50)
        lengths.append((count, 0 if count == 0 else count + chooser.number(0, 60)))
    num_groups = chooser.number(1, 9)
    case = paged_case(chooser, make_paged_case, lengths, num_groups)
    scoring = scoring_of(chooser)
    want = reference_attention(case.query, case.numbers, case.scales, case.which, scoring, num_groups)

    paged_prefill(case.query, case.numbers, case.scales, case.which, scoring, num_groups, case.out)

    assert_attended(case, want)


@pytest.mark.parametrize("number", CASES)
def test_products_with_codes(
    number: int, chooser: Chooser, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: tuple[Form, ...] = ("int4", "int8", "fp8")
    form, device = forms[number % 3], generator.device
    outputs, blocks = 8 * chooser.number(1, 20), chooser.number(1, 7)
    inputs = 128 * blocks if form == "fp8" else 32 * chooser.number(1, 4 * blocks)
    # A scale of some inputs, or of all.
    group_size = chooser.one(
        inputs, *(size for size in (32, 64, 128) if inputs % size == 0 and form != "fp8")
    )
    rows, num_splits = chooser.number(1, 40), chooser.number(1, -(-inputs // 128))
    monkeypatch.setattr(coded_product, "splits_of", lambda *_: num_splits)
    if form == "int4":
        numbers = torch.randint(0, 16, (outputs, inputs), generator=generator, device=device)
        codes, plain = (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8), numbers - 8.0
    else:
        wide = torch.randn(outputs, inputs, generator=generator, device=device)
        codes, _ = to_codes(wide, torch.int8 if form == "int8" else torch.float8_e4m3fn)
        plain = codes.float()
    scales = torch.rand(outputs, inputs // group_size, generator=generator, device=device) + 0.1
    weight = coded_weight(form, [codes], [scales])
    assert weight is not None, (form, outputs, inputs, group_size)
    x = torch.randn(rows, inputs, generator=generator, device=device).bfloat16()

    got = CodedProduct(weight, None)(x)

    exact = x.double() @ (plain * scales.repeat_interleave(group_size, 1)).double().t()
    assert float((got.double() - exact).norm() / exact.norm()) < 5e-3, (form, outputs, inputs, rows)


def drawn_of(logits: torch.Tensor, generator: torch.Generator, chooser: Chooser) -> tuple[torch.Tensor, ...]:
    """Tokens of the kernel, and the filters that they were drawn by."""
    count, device = len(logits), logits.device
    temperatures = torch.rand(count, generator=generator, device=device) * 2 + 0.1
    top_k = torch.tensor([chooser.number(1, logits.shape[1]) for _ in range(count)], device=device).int()
    top_p = torch.rand(count, generator=generator, device=device)
    min_p = torch.rand(count, generator=generator, device=device) * 0.1
    seeds = torch.randint(1 << 62, (count,), generator=generator, device=device)
    positions = torch.randint(1 << 20, (count,), generator=generator, device=device)
    tokens = torch.full((count,), -7, device=device)
    parameters = DrawParameters(None, temperatures, top_k, top_p, min_p, seeds, positions)
    draw(logits, parameters, tokens, block_size_of(logits.shape[1]), reads_places=False)
    return tokens, temperatures, top_k, top_p, min_p


@pytest.mark.parametrize("number", CASES)
def test_draws_keep_to_their_filters(number: int, chooser: Chooser, generator: torch.Generator) -> None:
    """Each token is one that all filters leave, but for those at their very edges."""
    dtype = torch.float32 if number % 2 else torch.bfloat16
    shape = (chooser.number(1, 5), chooser.number(2, 3000))
    logits = (torch.randn(shape, generator=generator, device=generator.device) * 3).to(dtype)

    tokens, temperatures, top_k, top_p, min_p = drawn_of(logits, generator, chooser)

    for row, token in enumerate(tokens.tolist()):
        assert 0 <= token < shape[1]
        shares = (logits[row].double() / temperatures[row].double()).softmax(0)
        own = shares[token]
        assert int((logits[row] > logits[row, token]).sum()) < int(top_k[row])
        assert own >= float(min_p[row]) * shares.max() * (1 - 1e-4)
        kept = shares.topk(int(top_k[row])).values
        kept = kept[kept >= float(min_p[row]) * shares.max()]
        assert float(kept[kept > own].sum() / kept.sum()) <= float(top_p[row]) + 1e-4

"""Products of 8-bit weights and inputs turned into 8-bit numbers (W8A8), against whole numbers in PyTorch."""

import math
import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from headway_runtime.kernels.cpu import coded_linear
from headway_runtime.kernels.cpu.integer_linear import IntegerLinear
from headway_runtime.kernels.cpu.processor import has_features
from headway_runtime.layers import cpu_kernels
from headway_runtime.layers.quantized_weights import Int8Input, Int8Weight

pytestmark = pytest.mark.skipif(
    not (cpu_kernels.multiplies_codes() and has_features(*coded_linear.NEEDED_FOR_INTEGERS)),
    reason="this machine has no products of whole numbers",
)

INPUTS = [
    pytest.param(Int8Input(), id="each row by its largest magnitude"),
    pytest.param(Int8Input(is_symmetric=False), id="each row by its range"),
    pytest.param(Int8Input(scale=0.03), id="one scale"),
    pytest.param(Int8Input(scale=0.02, zero=-31), id="one scale and zero point"),
]


def random_weight(outputs: int, inputs: int, generator: torch.Generator, how: Int8Input) -> Int8Weight:
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    return Int8Weight(codes, torch.rand(outputs, generator=generator).add_(0.5).mul_(0.01), how)


def random_rows(num_rows: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Of very different magnitudes, not around zero."""
    x = torch.randn((num_rows, inputs), generator=generator) + 0.5
    return (x * torch.randn((num_rows, 1), generator=generator).exp_()).bfloat16()


def made(parts: list[Int8Weight], bias: Tensor | None = None) -> IntegerLinear:
    layer = cpu_kernels.int8_linear(parts, bias)
    assert isinstance(layer, IntegerLinear)
    return layer


def as_numbers(x: Tensor, how: Int8Input) -> tuple[Tensor, Tensor]:
    """Whole numbers (zero points taken off again) and scales [rows, 1], in float32 as the kernel."""
    rows = x.float()
    if how.scale is not None:
        scale, zero = torch.full((len(x), 1), how.scale), torch.full((len(x), 1), float(how.zero))
    elif how.is_symmetric:
        scale, zero = rows.abs().amax(1, keepdim=True) / 127, torch.zeros((len(x), 1))
    else:
        least, most = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
        scale = (most - least) / 255
        zero = (-128 - least / scale).round()
    return ((rows / scale).round() + zero).clamp(-128, 127) - zero, scale


def check(got: Tensor, x: Tensor, parts: list[Int8Weight], bias: Tensor | None = None) -> None:
    """Sums are exact, so that only scaling and the result are rounded."""
    assert parts[0].input is not None
    numbers, scale = as_numbers(x, parts[0].input)
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    want = (numbers.double() @ codes.double().T) * scale.double() * scales.double()
    limit = want.abs() * (2**-8 + 1e-5)
    if bias is not None:
        limit += bias.double().abs() * (2**-8 + 1e-5)
        want += bias.double()
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= limit).all())


@pytest.mark.parametrize("how", INPUTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (48, 176), (128, 1024), (256, 2816)], ids=str)
def test_products_are_those_of_whole_numbers(
    outputs: int, inputs: int, how: Int8Input, generator: torch.Generator
) -> None:
    weight = random_weight(outputs, inputs, generator, how)
    layer = made([weight])
    assert (layer.num_inputs, layer.num_outputs) == (inputs, outputs)
    for num_rows in (0, 1, 2, 5, 6, 7, 11, random.randrange(12, 70)):
        x = random_rows(num_rows, inputs, generator)
        check(layer(x), x, [weight])


@pytest.mark.parametrize("how", INPUTS)
def test_parts_lie_one_below_the_other_and_the_bias_is_added(
    how: Int8Input, generator: torch.Generator
) -> None:
    parts = [random_weight(outputs, 192, generator, how) for outputs in (128, 16, 64)]
    bias = torch.randn(208, generator=generator).bfloat16()
    x = random_rows(9, 192, generator)
    check(made(parts, bias)(x), x, parts, bias)
    check(made(parts)(x), x, parts)


@pytest.mark.parametrize("how", INPUTS)
def test_numbers_are_the_same_whatever_the_number_of_rows_and_threads(
    how: Int8Input, generator: torch.Generator
) -> None:
    layer = made([random_weight(256, 2816, generator, how)])
    x = random_rows(301, 2816, generator)
    want = layer(x)
    for num_rows in (*range(20), 47, 142, 143, 288):
        first = random.randrange(301 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(layer(x[rows]), want[rows])
    threads_before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(layer(x), want)
            assert torch.equal(layer(x[:3]), want[:3])
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("how", INPUTS)
def test_a_row_that_is_no_number_spoils_itself_alone(how: Int8Input, generator: torch.Generator) -> None:
    layer = made([random_weight(64, 128, generator, how)])
    x = random_rows(20, 128, generator)
    want = layer(x)
    for row, number in ((0, math.nan), (7, math.inf), (19, -math.inf)):
        spoiled = x.clone()
        spoiled[row, 5] = number
        got = layer(spoiled)
        others = torch.arange(20) != row
        assert got[row].isnan().all()
        assert torch.equal(got[others], want[others])


def test_a_row_of_zeros_gives_the_bias(generator: torch.Generator) -> None:
    for how in (Int8Input(), Int8Input(is_symmetric=False), Int8Input(0.02, 5)):
        bias = torch.randn(32, generator=generator).bfloat16()
        layer = made([random_weight(32, 64, generator, how)], bias)
        assert torch.equal(layer(torch.zeros((3, 64), dtype=torch.bfloat16)), bias.expand(3, 32))


def test_the_largest_sums_do_not_overflow() -> None:
    inputs = 64_992
    weight = Int8Weight(
        torch.full((16, inputs), -128, dtype=torch.int8), torch.ones(16), Int8Input(1.0, -128)
    )
    x = torch.full((1, inputs), 1e9, dtype=torch.bfloat16)
    assert torch.equal(made([weight])(x), torch.full((1, 16), inputs * 255.0 * -128.0).bfloat16())


def test_what_no_kernel_computes_is_left_to_others(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outputs, inputs in ((24, 64), (32, 72), (16, 65_008)):
        assert cpu_kernels.int8_linear([random_weight(outputs, inputs, generator, Int8Input())], None) is None
    monkeypatch.setattr(coded_linear, "has_features", lambda *names: "avx512vnni" not in names)
    assert cpu_kernels.int8_linear([random_weight(32, 64, generator, Int8Input())], None) is None

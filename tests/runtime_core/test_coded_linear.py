"""Products of 8- and 4-bit weights by our CPU kernels, against what the weights mean, on random inputs."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from headway_runtime.kernels.cpu import coded_linear
from headway_runtime.layers import cpu_kernels
from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantizedWeight,
)

pytestmark = pytest.mark.skipif(
    not cpu_kernels.multiplies_codes(), reason="this machine has no products of 8- and 4-bit weights"
)

Make = Callable[[int, int, torch.Generator], QuantizedWeight]


def some_scales(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator).add_(0.5).mul_(0.01)


def int8(outputs: int, inputs: int, generator: torch.Generator, *, lowest: int = -127) -> Int8Weight:
    codes = torch.randint(lowest, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    return Int8Weight(codes, some_scales(outputs, generator=generator))


def int8_groups(outputs: int, inputs: int, generator: torch.Generator, *, size: int = 64) -> Int8GroupWeight:
    codes = torch.randint(60, 180, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = some_scales(outputs, inputs // size, generator=generator)
    zeros = torch.randint(60, 180, scales.shape, generator=generator).float()
    return Int8GroupWeight(codes, scales, zeros, size, torch.randperm(inputs, generator=generator))


def int4(
    outputs: int,
    inputs: int,
    generator: torch.Generator,
    *,
    size: int | None = None,
    has_zeros: bool = False,
    has_order: bool = False,
    has_half_scales: bool = False,
) -> Int4Weight:
    """size: None for one scale per output."""
    size = size or inputs
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    scales = some_scales(outputs, inputs // size, generator=generator)
    if has_half_scales:
        scales = scales.half().float()
    zeros = torch.randint(0, 17, scales.shape, generator=generator).float() if has_zeros else None
    order = None
    if has_order:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return Int4Weight(codes, scales, zeros, size, order)


def fp8(
    outputs: int, inputs: int, generator: torch.Generator, *, block: tuple[int, int] | None = None
) -> Fp8Weight:
    numbers = torch.randn((outputs, inputs), generator=generator)
    # Down to the least numbers, up to the largest.
    codes = (numbers * torch.randn((outputs, inputs), generator=generator).mul_(2).exp_()).clamp_(-448, 448)
    if block is None:
        scales = some_scales(outputs, generator=generator)
    else:
        scales = some_scales(-(-outputs // block[0]), -(-inputs // block[1]), generator=generator)
    return Fp8Weight(codes.to(torch.float8_e4m3fn), scales, block)


KINDS: dict[str, Make] = {
    "int8": int8,
    "int8 with its lowest code": partial(int8, lowest=-128),
    "int8 in groups, with zero points and an order": int8_groups,
    "fp8": fp8,
    "fp8 in blocks": partial(fp8, block=(128, 64)),
    "int4 in groups of 32": partial(int4, size=32),
    "int4 in groups of 64, half-precision scales": partial(int4, size=64, has_half_scales=True),
    "int4, one scale per output": int4,
    "int4 in groups of 64, with zero points": partial(int4, size=64, has_zeros=True),
    "int4, one zero point per output": partial(int4, has_zeros=True),
    "int4 with an order": partial(int4, size=64, has_zeros=True, has_order=True),
}


def made(parts: list[Any], bias: Tensor | None = None) -> Any:
    make: Any = {
        Int8Weight: cpu_kernels.int8_linear,
        Int8GroupWeight: cpu_kernels.int8_group_linear,
        Int4Weight: cpu_kernels.int4_linear,
        Fp8Weight: cpu_kernels.fp8_linear,
    }[type(parts[0])]
    return make(parts, bias)


def check(got: Tensor, x: Tensor, parts: list[QuantizedWeight], bias: Tensor | None = None) -> None:
    """Rounded to bfloat16 once, after sums in float32."""
    weight = torch.cat([part.dequantized(torch.float64) for part in parts])
    want, sizes = x.double() @ weight.T, x.double().abs() @ weight.T.abs()
    if bias is not None:
        want += bias.double()
    limit = want.abs() * 2**-8 + sizes * 1e-6 + 1e-30
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= limit).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(16, 64), (48, 192), (128, 1024), (256, 2816), (80, 320)], ids=str
)
def test_products_are_those_of_the_numbers_that_codes_stand_for(
    kind: str, outputs: int, inputs: int, generator: torch.Generator
) -> None:
    weight = KINDS[kind](outputs, inputs, generator)
    layer = made([weight])
    assert (layer.num_inputs, layer.num_outputs) == (inputs, outputs)
    for num_rows in (0, 1, 2, 5, 6, 7, 11, random.randrange(12, 70)):
        x = torch.randn((num_rows, inputs), generator=generator).bfloat16()
        check(layer(x), x, [weight])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_lie_one_below_the_other_and_the_bias_is_added(kind: str, generator: torch.Generator) -> None:
    parts: list[Any] = [KINDS[kind](outputs, 256, generator) for outputs in (128, 64, 16)]
    if kind == "int8 in groups, with zero points and an order":
        parts = [replace(part, input_order=parts[0].input_order) for part in parts]
    bias = torch.randn(208, generator=generator).bfloat16()
    x = torch.randn((9, 256), generator=generator).bfloat16()
    for num_rows in (1, 9):
        check(made(parts, bias)(x[:num_rows]), x[:num_rows], parts, bias)
        check(made(parts)(x[:num_rows]), x[:num_rows], parts)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_same_whatever_the_number_of_rows_and_threads(
    kind: str, generator: torch.Generator
) -> None:
    layer = made([KINDS[kind](256, 512, generator)])
    x = torch.randn((601, 512), generator=generator).bfloat16()
    want = layer(x)
    for num_rows in (*range(20), 47, 48, 70, 288, 289, 577):
        first = random.randrange(601 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(layer(x[rows]), want[rows]), f"rows {first} to {first + num_rows}"
    threads_before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(layer(x), want)
            assert torch.equal(layer(x[:3]), want[:3])
    finally:
        torch.set_num_threads(threads_before)


def test_every_code_of_8_bits_is_the_number_it_stands_for() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(16, 256).contiguous()
    ones = torch.ones(16)
    x = torch.eye(256, dtype=torch.bfloat16)
    signed = Int8Weight(codes.view(torch.int8), ones)
    assert torch.equal(made([signed])(x).float(), signed.codes.T.float())
    floats = Fp8Weight(codes.view(torch.float8_e4m3fn), ones)
    # Where a code is no number, neither is any product.
    numbers = floats.codes.float()
    is_number = ~numbers[0].isnan()
    zeroed = Fp8Weight(numbers.nan_to_num(0).to(torch.float8_e4m3fn), ones)
    assert torch.equal(made([zeroed])(x).float()[is_number], numbers.T[is_number])
    assert made([floats])(x).isnan().all()


def test_every_code_of_4_bits_is_what_it_is_above_every_zero_point() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = torch.stack([codes[::2] | (codes[1::2] << 4)] * 32)
    x = torch.eye(16, dtype=torch.bfloat16)
    for zero in range(17):
        zeros = torch.full((32, 1), float(zero))
        layer = made([Int4Weight(pairs, torch.ones((32, 1)), zeros, 16)])
        assert torch.equal(layer(x).float(), (codes.float() - zero).unsqueeze(1).expand(16, 32))


def test_a_row_that_is_no_number_spoils_itself_alone(generator: torch.Generator) -> None:
    for kind in ("int8", "int4 in groups of 32"):
        layer = made([KINDS[kind](64, 128, generator)])
        x = torch.randn((20, 128), generator=generator).bfloat16()
        want = layer(x)
        for row in (0, 7, 19):
            spoiled = x.clone()
            spoiled[row, 5] = math.nan
            got = layer(spoiled)
            others = torch.arange(20) != row
            assert got[row].isnan().all()
            assert torch.equal(got[others], want[others])


def test_packed_weights_take_what_their_codes_and_scales_take(generator: torch.Generator) -> None:
    for kind, most in (("int8", 1.02), ("int4 in groups of 32", 1.01)):
        weight = KINDS[kind](512, 1024, generator)
        assert made([weight]).weight.nbytes <= most * weight.num_bytes
    half = KINDS["int4 in groups of 64, half-precision scales"](512, 1024, generator)
    assert made([half]).weight.nbytes == 512 * (1024 // 2 + 1024 // 64 * 2)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(Int8Weight(torch.zeros((24, 64), dtype=torch.int8), torch.ones(24)), id="outputs"),
        pytest.param(Int8Weight(torch.zeros((32, 66), dtype=torch.int8), torch.ones(32)), id="inputs"),
        pytest.param(
            Int4Weight(torch.zeros((32, 18), dtype=torch.uint8), torch.ones((32, 9)), None, 4),
            id="groups of 4",
        ),
        pytest.param(
            Int4Weight(
                torch.zeros((32, 32), dtype=torch.uint8), torch.ones((32, 1)), torch.full((32, 1), 7.5), 64
            ),
            id="a zero point between codes",
        ),
        pytest.param(
            Int4Weight(
                torch.zeros((32, 32), dtype=torch.uint8), torch.ones((32, 1)), torch.full((32, 1), 17.0), 64
            ),
            id="a zero point above all codes",
        ),
        pytest.param(
            Int8GroupWeight(
                torch.full((32, 64), 200, dtype=torch.uint8), torch.ones((32, 1)), torch.zeros((32, 1)), 64
            ),
            id="codes far above their zero point",
        ),
        pytest.param(
            Fp8Weight(torch.zeros((32, 96)).to(torch.float8_e4m3fn), torch.ones((1, 2)), (32, 64)),
            id="half a block",
        ),
    ],
)
def test_what_no_kernel_computes_is_left_to_others(weight: QuantizedWeight) -> None:
    assert made([weight]) is None


def test_a_bias_of_another_type_or_an_older_processor_has_no_kernel(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = int8(32, 64, generator)
    assert made([weight], torch.zeros(32)) is None
    monkeypatch.setattr(coded_linear, "has_features", lambda *names: "avx512vbmi" not in names)
    assert made([weight]) is None
    assert made([KINDS["int4 in groups of 32"](32, 64, generator)]) is None

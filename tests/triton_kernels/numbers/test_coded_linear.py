"""Every form of quantized weights gets a layer whose product is that of what the weight stands for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.kernels.triton.coded_rows import coded_rows_reference
from headway_runtime.layers import coded_linear, kernel_choice
from headway_runtime.layers.coded_linear import CodedLinear, CodedRowsLinear, ScaledProduct
from headway_runtime.layers.quantized_linear import TiledLinear, make_merged_linear
from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
)
from headway_runtime.layers.quantizer import quantized, quantized_as
from headway_runtime.layers.weight_cuts import Part, cut
from headway_runtime.parallel.share import Range
from headway_runtime.quantization.scheme import Scheme

OUTPUTS, INPUTS = 128, 256


@pytest.fixture(autouse=True)
def _triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_choice", lambda: "triton")


def parts_of(kind: str, generator: torch.Generator) -> list[QuantizedWeight]:
    """One of OUTPUTS and one of half as many, as of keys beside queries."""
    device = generator.device
    weights = [
        torch.randn(count, INPUTS, generator=generator, device=device) / 8
        for count in (OUTPUTS, OUTPUTS // 2)
    ]
    match kind:
        case "int4 with zeros and order":
            order = torch.randperm(INPUTS, generator=generator, device=device)
            return [with_zeros(quantized(weight, "int4"), order) for weight in weights]
        case "int4 of unlike groups":
            return [quantized(weights[0], "int4"), quantized_as(weights[1], Scheme("packed", 4, "channel"))]
        case "int8 groups":
            scheme = Scheme("packed", 8, "group", group_size=64, is_symmetric=False)
            return [quantized_as(weight, scheme) for weight in weights]
        case "fp8 blocks":
            return [in_blocks(quantized(weight, "fp8"), generator) for weight in weights]
        case "fp8 blocks of a rank":
            wide = [torch.cat((weight, weight), 1) for weight in weights]
            parts = [in_blocks(quantized(weight, "fp8"), generator) for weight in wide]
            return [cut(part, Part(columns=Range(64, 64 + INPUTS))) for part in parts]
        case "fp8 blocks of 96":
            return [in_blocks(quantized(weight, "fp8"), generator, 96) for weight in weights]
    return [quantized(weight, kind) for weight in weights]  # type: ignore[arg-type]


def with_zeros(weight: QuantizedWeight, order: Tensor) -> Int4Weight:
    assert isinstance(weight, Int4Weight)
    zeros = torch.arange(weight.scales.numel()).remainder(16).float().view_as(weight.scales)
    return replace(weight, zeros=zeros.to(weight.codes.device), input_order=order)


def in_blocks(weight: QuantizedWeight, generator: torch.Generator, width: int = 128) -> Fp8Weight:
    assert isinstance(weight, Fp8Weight)
    shape = (-(-weight.shape[0] // 128), -(-weight.shape[1] // width))
    scales = torch.rand(shape, generator=generator, device=generator.device) / 1000 + 1e-4
    return Fp8Weight(weight.codes, scales, (128, width))


KINDS = (
    "int8",
    "int4",
    "fp8",
    "int4 with zeros and order",
    "int4 of unlike groups",
    "int8 groups",
    "fp8 blocks",
    "fp8 blocks of a rank",
    "fp8 blocks of 96",
)


def check(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert float((got.double() - want.double()).norm() / want.double().norm()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 9, 400])
def test_products_are_those_of_the_dequantized_weights(
    kind: str, rows: int, generator: torch.Generator
) -> None:
    """400 rows become fp8 as well where the weight is; their own rounding is then all that differs."""
    parts = parts_of(kind, generator)
    device = generator.device
    bias = torch.randn(OUTPUTS * 3 // 2, generator=generator, device=device).bfloat16()
    linear = make_merged_linear([*parts], bias, torch.bfloat16)
    assert isinstance(linear, CodedLinear)
    assert (linear.num_inputs, linear.num_outputs) == (INPUTS, OUTPUTS * 3 // 2)
    x = torch.randn(rows, INPUTS, generator=generator, device=device).bfloat16()
    rounded = x.float()
    if kind in ("fp8", "fp8 blocks") and rows > linear.most_rows:
        codes = coded_rows_reference(x, torch.float8_e4m3fn, in_groups=kind == "fp8 blocks")
        scales = codes.scales.repeat_interleave(128, 1) if kind == "fp8 blocks" else codes.scales[:, None]
        rounded = codes.codes.float() * scales
    weight = torch.cat([part.dequantized(torch.float32) for part in parts])

    check(linear(x), functional.linear(rounded, weight, bias.float()), 6e-3)


def test_many_rows_of_fp8_are_multiplied_as_fp8(generator: torch.Generator) -> None:
    plain, blocks = (
        make_merged_linear([*parts_of(kind, generator)], None, torch.bfloat16)
        for kind in ("fp8", "fp8 blocks")
    )
    assert isinstance(plain, CodedLinear)
    assert isinstance(blocks, CodedLinear)

    assert isinstance(plain._many, ScaledProduct)
    assert isinstance(blocks._many, CodedRowsLinear)


@pytest.mark.parametrize("outputs", [128, 136])
def test_fp8_of_other_sizes_and_types_becomes_plain_numbers(outputs: int, generator: torch.Generator) -> None:
    """136 is no multiple of 16, and PyTorch's product gives bfloat16 alone."""
    weight = torch.randn(outputs, INPUTS, generator=generator, device=generator.device)
    dtype = torch.float16 if outputs == 128 else torch.bfloat16
    part = quantized(weight, "fp8")
    linear = make_merged_linear([part], None, dtype)
    assert isinstance(linear, CodedLinear)
    x = torch.randn(390, INPUTS, generator=generator, device=generator.device).to(dtype)

    assert isinstance(linear._many, coded_linear.PlainProduct)
    check(linear(x), functional.linear(x.float(), part.dequantized(torch.float32)), 6e-3)


@pytest.mark.parametrize("quantization", [Int8Input(), Int8Input(is_symmetric=False), Int8Input(0.02, 5)])
@pytest.mark.parametrize("rows", [1, 30])
def test_integer_inputs_are_rounded_as_they_are_elsewhere(
    quantization: Int8Input, rows: int, generator: torch.Generator
) -> None:
    from headway_runtime.layers.quantized_linear import as_integers

    parts = [
        replace(part, input=quantization)
        for part in parts_of("int8", generator)
        if isinstance(part, Int8Weight)
    ]
    linear = make_merged_linear([*parts], None, torch.bfloat16)
    assert isinstance(linear, CodedRowsLinear)
    x = torch.randn(rows, INPUTS, generator=generator, device=generator.device).bfloat16()
    numbers, scale = as_integers(x.float(), quantization)
    weight = torch.cat([part.dequantized(torch.float32) for part in parts])

    check(linear(x), functional.linear(numbers * scale, weight), 4e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_ranks_share_of_inputs_in_order_has_groups_that_kernels_know(
    bits: int, generator: torch.Generator
) -> None:
    """Groups have unlike numbers of inputs of the share, and are filled up."""
    device = generator.device
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator, device=device)
    order = torch.randperm(INPUTS, generator=generator, device=device)
    scheme = Scheme("packed", bits, "group", group_size=128, is_symmetric=False)  # type: ignore[arg-type]
    whole = replace(quantized_as(weight, scheme), input_order=order)  # type: ignore[arg-type]
    own = cut(whole, Part(columns=Range(64, 192)))
    linear = make_merged_linear([own], None, torch.bfloat16)
    assert isinstance(linear, CodedLinear)
    x = torch.randn(3, 128, generator=generator, device=device).bfloat16()

    want = whole.dequantized(torch.float32)[:, 64:192]
    check(linear(x), functional.linear(x.float(), want), 6e-3)
    torch.testing.assert_close(own.dequantized(torch.float32), want, rtol=0, atol=0)
    torch.testing.assert_close(linear.plain(torch.float32), want)


@pytest.mark.parametrize("group_size", [16, 48])
def test_groups_that_no_kernel_knows_are_left_to_torch(group_size: int, generator: torch.Generator) -> None:
    inputs = 4 * group_size
    weight: Any = quantized_as(
        torch.randn(32, inputs, generator=generator, device=generator.device),
        Scheme("packed", 4, "group", group_size=group_size),
    )
    linear = make_merged_linear([weight], None, torch.float32)

    assert isinstance(linear, TiledLinear)

"""Layers of quantized weights against their dequantized weights in float32, on every path there is."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway_runtime.layers import cpu_kernels, quantized_linear
from headway_runtime.layers.quantized_linear import (
    MOST_PACKED_ROWS,
    IntegerInputLinear,
    PackedInt4Linear,
    PackedInt8Linear,
    SideBySideLinear,
    TiledLinear,
    as_integers,
    make_merged_linear,
)
from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
)
from headway_runtime.layers.quantizer import quantized, quantized_as
from headway_runtime.quantization.scheme import Scheme

OUTPUTS, INPUTS = 96, 256
ROWS = (1, 3, MOST_PACKED_ROWS, MOST_PACKED_ROWS + 1, 70)


def normal(*shape: int, seed: int = 1) -> Tensor:
    numbers: Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers / float(shape[-1] ** 0.5)


def parts_of(kind: str) -> list[QuantizedWeight]:
    weights = [normal(OUTPUTS, INPUTS, seed=1), normal(2 * OUTPUTS, INPUTS, seed=2)]
    match kind:
        case "int4 with zeros and order":
            order = torch.from_numpy(np.random.default_rng(3).permutation(INPUTS))
            return [with_zeros(quantized(weight, "int4"), order) for weight in weights]
        case "int4 of unlike groups":
            whole = Scheme("packed", 4, "channel")
            return [quantized(weights[0], "int4"), quantized_as(weights[1], whole)]
        case "int8 groups":
            scheme = Scheme("packed", 8, "group", group_size=64, is_symmetric=False)
            return [quantized_as(weight, scheme) for weight in weights]
        case "fp8 blocks":
            return [in_blocks(quantized(weight, "fp8")) for weight in weights]
    return [quantized(weight, kind) for weight in weights]  # type: ignore[arg-type]


def in_blocks(weight: QuantizedWeight) -> Fp8Weight:
    assert isinstance(weight, Fp8Weight)
    shape = (-(-weight.shape[0] // 64), -(-weight.shape[1] // 128))
    return Fp8Weight(weight.codes, normal(*shape, seed=7).abs(), (64, 128))


def with_zeros(weight: QuantizedWeight, order: Tensor) -> Int4Weight:
    assert isinstance(weight, Int4Weight)
    zeros = torch.arange(weight.scales.numel()).remainder(15).float().view_as(weight.scales)
    return Int4Weight(weight.codes, weight.scales, zeros, weight.group_size, order)


KINDS = (
    "int8",
    "int4",
    "fp8",
    "int4 with zeros and order",
    "int4 of unlike groups",
    "int8 groups",
    "fp8 blocks",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["our products", "PyTorch's products", "tiles"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_those_of_the_dequantized_weights(
    kind: str, path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path != "our products":
        monkeypatch.setattr(cpu_kernels, "multiplies_codes", lambda: False)
    if path == "tiles":
        monkeypatch.setattr(quantized_linear, "can_pack_int8", lambda: False)
        monkeypatch.setattr(quantized_linear, "can_pack_int4", lambda: False)
        monkeypatch.setattr(quantized_linear, "TILE_NUMBERS", 20 * INPUTS)
    parts = parts_of(kind)
    bias = normal(3 * OUTPUTS, seed=4).to(dtype)
    linear = make_merged_linear([*parts], bias, dtype)
    if path == "tiles" or dtype != torch.bfloat16:
        assert isinstance(linear, TiledLinear)
    assert (linear.num_inputs, linear.num_outputs) == (INPUTS, 3 * OUTPUTS)
    weight = torch.cat([part.dequantized(torch.float32) for part in parts])
    for rows in ROWS:
        x = normal(rows, INPUTS, seed=rows).to(dtype) * 8
        want = torch.nn.functional.linear(x.float(), weight, bias.float())
        got = linear(x)
        assert got.dtype == dtype
        tolerance = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(
            got.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max())
        )


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 24), (64, 72), (64, 100), (90, 50), (77, 33), (30, 77), (96, 120)]
)
@pytest.mark.parametrize("kind", ["int8", "int8 with integer inputs", "fp8"])
@pytest.mark.parametrize("path", ["our products", "PyTorch's products"])
def test_products_of_sizes_that_no_vector_divides(
    outputs: int, inputs: int, kind: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path != "our products":
        monkeypatch.setattr(cpu_kernels, "multiplies_codes", lambda: False)
    weight = quantized(normal(outputs, inputs, seed=1), "fp8" if kind == "fp8" else "int8")
    if kind == "int8 with integer inputs":
        assert isinstance(weight, Int8Weight)
        weight = Int8Weight(weight.codes, weight.scales, Int8Input(None))
    linear = make_merged_linear([weight], None, torch.bfloat16)
    for rows in ROWS:
        x = normal(rows, inputs, seed=rows).bfloat16() * 8
        want = x.float() @ weight.dequantized(torch.float32).t()
        bound = 3e-2 * float(want.abs().max())
        torch.testing.assert_close(linear(x).float(), want, rtol=3e-2, atol=bound)


def test_pytorchs_products_are_used_where_there_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor that this PyTorch has them for, which the probes tell."""
    monkeypatch.setattr(cpu_kernels, "multiplies_codes", lambda: False)
    if quantized_linear.can_pack_int8():
        assert isinstance(make_merged_linear([*parts_of("int8")], None, torch.bfloat16), PackedInt8Linear)
    if quantized_linear.can_pack_int4():
        assert isinstance(make_merged_linear([*parts_of("int4")], None, torch.bfloat16), PackedInt4Linear)
        unlike = make_merged_linear([*parts_of("int4 of unlike groups")], None, torch.bfloat16)
        assert isinstance(unlike, TiledLinear)


@pytest.mark.parametrize("operator", ["_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu"])
@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_products_that_are_missing_or_wrong_are_not_used(
    operator: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = quantized_linear.can_pack_int8 if "int8" in operator else quantized_linear.can_pack_int4

    def absent(*operands: Any) -> Tensor:
        raise NotImplementedError("not on this processor")

    def zeros(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        return x.new_zeros(len(x), 48 if "int8" in operator else 64)

    monkeypatch.setattr(torch.ops.aten, operator, absent if fault == "missing" else zeros)
    assert not probe.__wrapped__()


def test_unlike_parts_lie_side_by_side() -> None:
    plain = normal(OUTPUTS, INPUTS, seed=5).bfloat16()
    int8, int4 = parts_of("int8")[0], parts_of("int4")[0]
    linear = make_merged_linear([int8, int8, plain, int4], None, torch.bfloat16)
    assert isinstance(linear, SideBySideLinear)
    assert [layer.num_outputs for layer in linear.layers] == [2 * OUTPUTS, OUTPUTS, OUTPUTS]
    x = normal(2, INPUTS).bfloat16()
    weights = [part.dequantized(torch.float32) for part in (int8, int8)] + [plain.float()]
    want = x.float() @ torch.cat([*weights, int4.dequantized(torch.float32)]).t()
    torch.testing.assert_close(linear(x).float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_integer_inputs_with_other_scales_do_not_share_a_product(dtype: torch.dtype) -> None:
    part = parts_of("int8")[0]
    assert isinstance(part, Int8Weight)
    inputs = [Int8Input(scale) for scale in (0.01, 0.01, 0.02)]
    linear = make_merged_linear([Int8Weight(part.codes, part.scales, one) for one in inputs], None, dtype)
    assert isinstance(linear, SideBySideLinear)
    assert [layer.num_outputs for layer in linear.layers] == [2 * OUTPUTS, OUTPUTS]


@pytest.mark.parametrize("path", ["our products", "others"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quantization", [Int8Input(), Int8Input(is_symmetric=False), Int8Input(0.01, 5)])
def test_integer_inputs_are_rounded_the_same_on_all_paths(
    path: str, dtype: torch.dtype, quantization: Int8Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "others":
        monkeypatch.setattr(cpu_kernels, "multiplies_codes", lambda: False)
    part = parts_of("int8")[0]
    assert isinstance(part, Int8Weight)
    bias = normal(OUTPUTS, seed=4).to(dtype)
    linear = make_merged_linear([Int8Weight(part.codes, part.scales, quantization)], bias, dtype)
    has_own = cpu_kernels.multiplies_codes() and dtype == torch.bfloat16
    assert isinstance(linear, IntegerInputLinear) == (not has_own)
    x = normal(5, INPUTS).to(dtype) * 3
    numbers, scale = as_integers(x.float(), quantization)
    want = torch.nn.functional.linear(numbers * scale, part.dequantized(torch.float32), bias.float())
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        linear(x).float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max())
    )


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.01), ("fp8", 0.03), ("int4", 0.11)])
def test_quantizing_loses_no_more_than_its_bits(kind: Any, most: float) -> None:
    """Of normal numbers, relative to their norm."""
    weight = normal(64, 512)
    weight[3] = 0
    got = quantized(weight, kind)
    assert got.shape == (64, 512)
    lost = float((got.dequantized(torch.float32) - weight).norm() / weight.norm())
    assert most / 3 < lost < most
    assert not got.dequantized(torch.float32)[3].any()


def test_scales_of_four_bits_are_exact_in_float16() -> None:
    got = quantized(normal(64, 512), "int4")
    assert isinstance(got, Int4Weight)
    assert torch.equal(got.scales.half().float(), got.scales)


@pytest.mark.parametrize(("inputs", "group_size"), [(512, 128), (192, 64), (160, 32), (112, 112)])
def test_groups_of_four_bits_are_the_largest_that_divide(inputs: int, group_size: int) -> None:
    got = quantized(normal(16, inputs), "int4")
    assert isinstance(got, Int4Weight)
    assert (got.group_size, got.scales.shape) == (group_size, (16, inputs // group_size))


def test_searching_for_a_step_makes_errors_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway_runtime.layers import quantizer

    weight = normal(256, 512)

    def lost() -> float:
        return float((quantized(weight, "int4").dequantized(torch.float32) - weight).norm())

    searched = lost()
    monkeypatch.setattr(quantizer, "SHRINKS", ())
    assert searched < 0.98 * lost()


def test_eight_bit_groups_of_made_up_weights_are_near_them() -> None:
    weight = normal(32, 256)
    got = quantized_as(weight, Scheme("gptq", 8, "group", group_size=64, has_input_order=True))
    assert isinstance(got, Int8GroupWeight)
    torch.testing.assert_close(got.dequantized(torch.float32), weight, rtol=0, atol=1e-2)

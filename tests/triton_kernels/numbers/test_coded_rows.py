"""Rows become the codes that torch makes of them, and products of codes are those of what they stand for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headway_runtime.kernels.triton import coded_rows_product
from headway_runtime.kernels.triton.coded_rows import CodedRows, coded_rows, coded_rows_reference
from headway_runtime.kernels.triton.coded_rows_product import CodedRowsProduct, RowWeight, product_reference

KINDS: dict[str, dict[str, Any]] = {
    "int8 rows": {"dtype": torch.int8},
    "int8 ranges": {"dtype": torch.int8, "is_symmetric": False},
    "int8 given": {"dtype": torch.int8, "given": (0.013, -7)},
    "fp8 rows": {"dtype": torch.float8_e4m3fn},
    "fp8 groups": {"dtype": torch.float8_e4m3fn, "in_groups": True},
}


def random_rows(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Of unlike magnitudes, one of zeros."""
    x = torch.randn(rows, size, generator=generator, device=generator.device)
    x *= 2 ** torch.randint(-6, 4, (rows, 1), generator=generator, device=generator.device)
    x[rows // 2] = 0
    return x


@pytest.mark.parametrize("size", [128, 384, 640])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_reference(
    kind: str, dtype: torch.dtype, size: int, generator: torch.Generator
) -> None:
    x = random_rows(5, size, generator).to(dtype)
    got, want = coded_rows(x, **KINDS[kind]), coded_rows_reference(x, **KINDS[kind])

    torch.testing.assert_close(got.scales, want.scales, rtol=1e-6, atol=0)
    assert (got.zeros is None) == (want.zeros is None)
    if got.zeros is not None and want.zeros is not None:
        assert torch.equal(got.zeros, want.zeros)
    # A scale whose last bit differs moves a number across a half now and then.
    differs = got.codes.float() != want.codes.float()
    assert float(differs.float().mean()) < 2e-3
    numbers = [each.codes.float() for each in (got, want)]
    step = 1 if KINDS[kind]["dtype"] == torch.int8 else 32
    assert float((numbers[0] - numbers[1]).abs().max()) <= step


def test_rows_that_lie_apart_and_no_rows(generator: torch.Generator) -> None:
    wide = random_rows(4, 256, generator)
    got = coded_rows(wide[:, 128:], torch.int8)

    assert torch.equal(got.codes, coded_rows(wide[:, 128:].contiguous(), torch.int8).codes)
    assert coded_rows(wide[:0], torch.int8).codes.shape == (0, 256)


def random_int8(outputs: int, inputs: int, generator: torch.Generator) -> RowWeight:
    device = generator.device
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator, device=device).to(torch.int8)
    scales = torch.rand(outputs, generator=generator, device=device) / 100 + 1e-3
    return RowWeight(codes, scales, codes.sum(1, dtype=torch.int32))


def random_fp8(outputs: int, inputs: int, generator: torch.Generator, *, has_blocks: bool) -> RowWeight:
    device = generator.device
    codes = torch.randn(outputs, inputs, generator=generator, device=device) * 100
    shape = (-(-outputs // 128), -(-inputs // 128)) if has_blocks else (outputs,)
    scales = torch.rand(shape, generator=generator, device=device) / 100 + 1e-3
    return RowWeight(codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales)


def check(x: CodedRows, weight: RowWeight, generator: torch.Generator) -> None:
    bias = torch.randn(len(weight.codes), generator=generator, device=generator.device).bfloat16()
    got = CodedRowsProduct(weight, bias)(x, torch.bfloat16)
    want = product_reference(x, weight, bias)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["int8 rows", "int8 ranges", "int8 given"])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_products_of_int8(kind: str, rows: int, generator: torch.Generator) -> None:
    x = coded_rows(random_rows(rows, 320, generator), **KINDS[kind])

    check(x, random_int8(72, 320, generator), generator)


@pytest.mark.parametrize("kind", ["fp8 rows", "fp8 groups"])
def test_products_of_fp8(kind: str, generator: torch.Generator) -> None:
    has_blocks = kind == "fp8 groups"
    x = coded_rows(random_rows(67, 384, generator), **KINDS[kind])

    check(x, random_fp8(200, 384, generator, has_blocks=has_blocks), generator)


@pytest.mark.parametrize("num_splits", [2, 7])
def test_splits_are_added_up_exactly(
    num_splits: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = coded_rows(random_rows(3, 1024, generator), torch.int8, is_symmetric=False)
    weight = random_int8(70, 1024, generator)
    product = CodedRowsProduct(weight, None)
    whole = product(x, torch.float32)
    monkeypatch.setattr(coded_rows_product, "splits_of", lambda *_: num_splits)

    assert torch.equal(product(x, torch.float32), whole)
    assert torch.equal(product(x, torch.float32), whole)


def test_no_rows_give_no_rows(generator: torch.Generator) -> None:
    x = coded_rows(torch.empty(0, 128, device=generator.device), torch.int8)

    assert CodedRowsProduct(random_int8(64, 128, generator), None)(x, torch.bfloat16).shape == (0, 64)

"""Codes of one byte, bit by bit those of the KV cache's reference."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.codes import (
    as_bytes,
    codes_of,
    inverse_and_scale,
    kept_as,
    magnitude_bits,
)
from headway_runtime.kernels.triton.launch import INTERPRETER
from headway_runtime.layers.kv_numbers import to_codes

CODES = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)


@triton.jit  # type: ignore[untyped-decorator]
def codes_kernel(  # type: ignore[no-untyped-def]
    x_pointer, codes_pointer, scale_pointer, SIZE: tl.constexpr, KEPT: tl.constexpr
):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_pointer + places)
    inverse, scale = inverse_and_scale(tl.max(magnitude_bits(x), 0), KEPT)
    codes = codes_of(x * inverse, KEPT)
    tl.store(codes_pointer + places, codes)
    tl.store(scale_pointer + tl.program_id(0), scale)


def by_kernel(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scales = torch.empty_like(x, dtype=dtype), torch.empty(len(x))
    codes_kernel[(len(x),)](x, as_bytes(codes), scales, SIZE=x.shape[1], KEPT=kept_as(dtype, INTERPRETER))
    return codes, scales


@CODES
@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["even", "over many exponents"])
def test_codes_and_scales_are_the_references(dtype: torch.dtype, spread: float) -> None:
    x = torch.randn(60, 256) * torch.exp(torch.randn(60, 256) * spread / 10)
    x[3] = 0.0
    x[4, :7] = 0.0

    codes, scales = by_kernel(x, dtype)

    want_codes, want_scales = to_codes(x, dtype)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert torch.equal(scales, want_scales)


@CODES
def test_numbers_half_way_between_codes_become_even_ones(dtype: torch.dtype) -> None:
    largest = 127.0 if dtype == torch.int8 else 448.0
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float().nan_to_num(0.0).clamp(-largest, largest)
    ordered = torch.tensor(sorted(set(exact.tolist())))
    halves = (ordered[1:] + ordered[:-1]) / 2
    x = torch.zeros(1, 512)
    x[0, : len(halves)] = halves
    x[0, -1] = largest

    codes, _ = by_kernel(x, dtype)

    assert torch.equal(codes.view(torch.uint8), to_codes(x, dtype)[0].view(torch.uint8))


@CODES
def test_what_is_no_number_shows_in_the_scale(dtype: torch.dtype) -> None:
    x = torch.randn(1, 64)
    x[0, 5] = float("nan")

    _, scales = by_kernel(x, dtype)

    assert scales.isnan().all()

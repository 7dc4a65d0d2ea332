"""Norms of rows, with what is added before and the codes after."""

import pytest
import torch
from torch import Tensor

from headway_runtime.kernels.triton.codes import row_codes_by_torch
from headway_runtime.kernels.triton.norm import Norm, norm_by_torch

EPSILON = 1e-5
# A unit in the last place, relative: one rounding, and one more where sums round differently.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
CODES = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)


def rows(count: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(count, size) * scale).to(dtype)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * TOLERANCES[dtype], atol=1e-6)


@DTYPES
@pytest.mark.parametrize(
    ("count", "size"),
    [(0, 64), (1, 64), (5, 100), (2, 1), (3, 4096)],
    ids=["empty", "one", "odd", "1", "4096"],
)
def test_rows_are_normed_as_by_torch(count: int, size: int, dtype: torch.dtype) -> None:
    x, weight = rows(count, size, dtype, 3.0), rows(1, size, dtype)[0]
    before = x.clone()

    got = Norm(size, EPSILON).norm(x, weight)

    want = norm_by_torch(x, None, None, weight, EPSILON)
    assert isinstance(want, Tensor)
    assert_close(got, want, dtype)
    assert torch.equal(x, before)


@DTYPES
def test_a_delta_is_added_in_place_and_the_sum_is_normed(dtype: torch.dtype) -> None:
    x, delta, weight = rows(7, 130, dtype), rows(7, 130, dtype), rows(1, 130, dtype)[0]
    want_x = x.clone()
    want = norm_by_torch(want_x, delta, None, weight, EPSILON)

    got = Norm(130, EPSILON).add_and_norm(x, delta, weight)

    assert isinstance(want, Tensor)
    assert torch.equal(x, want_x)
    assert_close(got, want, dtype)


@DTYPES
def test_the_norm_of_a_delta_is_added_as_gemma_does(dtype: torch.dtype) -> None:
    x, delta = rows(4, 96, dtype), rows(4, 96, dtype, 5.0)
    delta_weight, weight = 1.0 + torch.randn(96) / 8, 1.0 + torch.randn(96) / 8
    want_x, given = x.clone(), delta.clone()
    want = norm_by_torch(want_x, delta, delta_weight, weight, EPSILON)

    got = Norm(96, EPSILON).norm_add_and_norm(x, delta, delta_weight, weight)

    assert isinstance(want, Tensor)
    assert_close(x, want_x, dtype)
    torch.testing.assert_close(
        got.float(), want.float(), rtol=4 * TOLERANCES[dtype], atol=8 * TOLERANCES[dtype]
    )
    assert torch.equal(delta, given)


@CODES
@pytest.mark.parametrize("with_delta", [False, True], ids=["norm", "add and norm"])
def test_codes_are_those_of_the_rounded_norm(codes: torch.dtype, with_delta: bool) -> None:  # noqa: FBT001
    x, weight = rows(6, 200, torch.bfloat16), rows(1, 200, torch.bfloat16)[0]
    x[2] = 0.0
    delta = rows(6, 200, torch.bfloat16) if with_delta else None
    if delta is not None:
        delta[2] = 0.0
    plain = Norm(200, EPSILON)
    as_numbers = plain.norm(x, weight) if delta is None else plain.add_and_norm(x.clone(), delta, weight)

    got = plain.codes(x, delta, None, weight, codes)

    want = row_codes_by_torch(as_numbers, codes)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)
    assert got.dtype == torch.bfloat16

"""The gated middle of an MLP: by itself, as codes, and with the product before it."""

import pytest
import torch
from torch import Tensor

from headway_runtime.kernels.triton.codes import row_codes_by_torch
from headway_runtime.kernels.triton.gate import ActivateAndMultiply, gate_by_torch
from headway_runtime.kernels.triton.gated_product import MOST_ROWS, GatedProduct, gated_product_by_torch
from headway_runtime.model_config import Activation

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])


@DTYPES
@ACTIVATIONS
@pytest.mark.parametrize(("count", "size"), [(0, 64), (1, 64), (3, 77), (2, 1500)], ids=str)
def test_gates_are_multiplied_as_by_torch(
    count: int, size: int, activation: Activation, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(count, 2 * size) * 3).to(dtype)

    got = ActivateAndMultiply(activation, size)(gate_up)

    want = gate_by_torch(gate_up, activation)
    assert isinstance(want, Tensor)
    assert got.shape == (count, size)
    torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype], atol=1e-5)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
@ACTIVATIONS
def test_codes_are_those_of_the_rounded_middle(activation: Activation, codes: torch.dtype) -> None:
    gate_up = (torch.randn(4, 2 * 300) * 2).to(torch.bfloat16)
    gate_up[1] = 0.0
    gate = ActivateAndMultiply(activation, 300)
    numbers = gate(gate_up)

    got = gate.codes(gate_up, codes)

    want = row_codes_by_torch(numbers, codes)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    ("count", "size", "num_inputs"),
    [(0, 32, 64), (1, 32, 128), (3, 77, 200), (17, 40, 130), (33, 65, 64), (MOST_ROWS, 33, 256)],
    ids=str,
)
def test_products_are_gated_as_by_torch(
    count: int,
    size: int,
    num_inputs: int,
    with_bias: bool,  # noqa: FBT001
    dtype: torch.dtype,
) -> None:
    x = torch.randn(count, num_inputs).to(dtype)
    weight = (torch.randn(2 * size, num_inputs) / num_inputs**0.5).to(dtype)
    bias = torch.randn(2 * size).to(dtype) if with_bias else None

    got = GatedProduct("silu")(x, weight, bias)

    want = gated_product_by_torch(x, weight, bias, "silu")
    # A sum of so many products of size one differs by some 1e-6 from the same sum in another order, where
    # gate and up are a few times larger than one by ten times that: near zero only an absolute bound holds.
    torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype], atol=max(TOLERANCES[dtype] / 5, 3e-5))

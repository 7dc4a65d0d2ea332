"""Products of few rows with a plain weight against float32."""

import pytest
import torch

from headway_runtime.kernels.triton.launch import DEFAULT, configuration, gpu_of
from headway_runtime.kernels.triton.thin_product import (
    BLOCK_ROWS,
    KERNEL,
    ThinProduct,
    thin_product_by_torch,
)

TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "shape"),
    # The last has more tiles than there are counters for, and the one before nine splits.
    [(0, (32, 64)), (1, (33, 100)), (BLOCK_ROWS, (77, 1000)), (3, (32, 4700)), (2, (700, 64))],
    ids=str,
)
def test_rows_are_multiplied_as_by_torch(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, has_bias: bool
) -> None:
    outputs, inputs = shape
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if has_bias else None
    product = ThinProduct(weight, bias)

    # Splits of the inputs meet in counters, which the next launch finds as this one did.
    first, second = product(x), product(x)

    want = thin_product_by_torch(x, weight, bias)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] / 4)


def test_rows_lie_where_they_lie(device: torch.device) -> None:
    both = torch.randn(4, 2 * 96, device=device).to(torch.bfloat16)
    weight = torch.randn(40, 96, device=device).to(torch.bfloat16)
    product = ThinProduct(weight, None)

    assert torch.equal(product(both[:, :96]), product(both[:, :96].contiguous()))


def test_large_weights_are_left_to_others(device: torch.device) -> None:
    small, large = (
        torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device)
        for outputs, inputs in ((64, 64), (2**14, 2**13))
    )

    assert ThinProduct(small, None).most_rows == BLOCK_ROWS
    assert ThinProduct(large, None).most_rows == 0


def test_weights_whose_tiles_do_not_run_at_once_are_left_to_others(device: torch.device) -> None:
    gpu = gpu_of(device)
    entry = configuration(KERNEL, DEFAULT, gpu)
    fitting = entry["programs"] * gpu.num_multiprocessors * entry["BLOCK_OUTPUTS"]
    both = torch.empty(fitting + 1, 16, dtype=torch.bfloat16, device=device)

    assert ThinProduct(both[:fitting], None).most_rows == BLOCK_ROWS
    assert ThinProduct(both, None).most_rows == 0

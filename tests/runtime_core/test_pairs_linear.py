"""Products of pairs of bfloat16 on a CPU that multiplies them, against float32 PyTorch."""

import math

import pytest
import torch
from tests.runtime_core.closeness import close

pytest.importorskip("llvmlite")

from headway_runtime.kernels.cpu.linear import PairsLinear
from headway_runtime.kernels.cpu.processor import has_features
from headway_runtime.layers import cpu_kernels

pytestmark = [
    pytest.mark.skipif(
        cpu_kernels.activate_and_multiply("silu", 64, torch.float32, torch.device("cpu")) is None,
        reason="this machine compiles no CPU kernels",
    ),
    pytest.mark.skipif(
        not has_features("avx512bf16"), reason="this processor does not multiply pairs of bfloat16"
    ),
]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 16, 23, 250])
@pytest.mark.parametrize(("outputs", "inputs"), [([64], 32), ([128, 64, 64], 1024), ([48], 2), ([80], 2816)])
def test_products_of_pairs_equal_float32(
    rows: int, outputs: list[int], inputs: int, generator: torch.Generator
) -> None:
    parts = [torch.randn((size, inputs), generator=generator).bfloat16() for size in outputs]
    bias = torch.randn(sum(outputs), generator=generator).bfloat16()
    x = torch.randn((rows, inputs), generator=generator).bfloat16()
    want = x.float() @ torch.cat(parts).float().T
    assert close(PairsLinear(parts, None)(x), want)
    assert close(PairsLinear(parts, bias)(x), want + bias.float())


def test_products_of_pairs_do_not_hang_on_other_rows_or_threads(generator: torch.Generator) -> None:
    x = torch.randn((300, 1024), generator=generator).bfloat16()
    part = torch.randn((192, 1024), generator=generator).bfloat16()
    threads_before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 2, 5, 13):
            torch.set_num_threads(num_threads)
            linear = PairsLinear([part], None)
            outs += [linear(x), torch.cat([linear(x[:1]), linear(x[1:18].contiguous()), linear(x[18:])])]
    finally:
        torch.set_num_threads(threads_before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_products_of_pairs_write_their_own_rows_alone(generator: torch.Generator) -> None:
    linear = PairsLinear([torch.randn((64, 32), generator=generator).bfloat16()], None)
    assert linear(torch.empty((0, 32), dtype=torch.bfloat16)).shape == (0, 64)
    x = torch.ones((9, 32), dtype=torch.bfloat16)
    x[4] = math.nan
    assert linear(x).isnan().any(-1).tolist() == [False] * 4 + [True] + [False] * 4

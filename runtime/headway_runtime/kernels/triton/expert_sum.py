"""A row's results of all its experts, each times its weight, added up.

Floor: every result read once and a row written once, 2 * (num_used + 1) bytes a number: 38 MB and 9 us at 4.3
TB/s for 1,024 rows of 2,048 numbers and 8 experts. Results lie in the rows' own order, so nothing is looked
up, and loads are 16 bytes wide; sums are float32 in the order of the choices.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import (
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.rounding import narrow

KERNEL = "expert_sum"
CANDIDATES = {"default": [{"BLOCK": block, "num_warps": 4} for block in (512, 1024, 2048)]}


@triton.jit
def expert_sum_kernel(results, weights, out, size, NUM_USED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: rows, blocks of numbers. results: [rows * NUM_USED, size]. weights: float32 [rows, NUM_USED]."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < size
    total = tl.zeros([BLOCK], tl.float32)
    for used in tl.static_range(NUM_USED):
        slot = row * NUM_USED + used
        result = tl.load(results + slot * size + places, mask=is_inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights + slot)
    tl.store(out + row * size + places, narrow(total, out.dtype.element_ty), mask=is_inside)


def expert_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[rows, size]. results: [rows * used, size]. weights: [rows, used]."""
    (num_rows, num_used), size = weights.shape, results.shape[1]
    out = results.new_empty((num_rows, size))
    if num_rows:
        constants, options = split_options(configuration(KERNEL, str(size), gpu_of(results.device)))
        grid = (num_rows, triton.cdiv(size, constants["BLOCK"]))
        expert_sum_kernel[grid](results, weights, out, size, NUM_USED=num_used, **constants, **options)
    return out


def sum_reference(results: Tensor, weights: Tensor) -> Tensor:
    """float32."""
    weighted: Tensor = results.float().unflatten(0, weights.shape) * weights.unsqueeze(-1)
    return weighted.sum(1)


def _cases() -> Iterator[CompileCase]:
    for one in configurations(KERNEL):
        constants, options = split_options(one.values)
        yield CompileCase(
            one.label,
            expert_sum_kernel,
            {"results": "*bf16", "weights": "*fp32", "out": "*bf16", "size": "i32:16"},
            {"NUM_USED": 8, **constants},
            options,
            one.capabilities,
        )


COMPILED = list(_cases())

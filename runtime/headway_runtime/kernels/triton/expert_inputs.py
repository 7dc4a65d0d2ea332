"""Rows as their experts want them, one for each slot: in an expert's order of inputs, or as its int8 codes.

For weights whose inputs lie in an order of each expert's own (act-order), and for those whose inputs become
integers by a scale that was measured for each expert; products then read one row for each slot. Floor: a row
read and one written for each slot, 2 bytes a number each (or 1 as codes): 34 MB and 8 us at 4.3 TB/s for the
8 experts of 1,024 rows of 2,048 bfloat16 numbers, which come from the L2 cache, and 8 bytes of an order a
number, shared by all slots of an expert. At decode the time of a launch.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.coded_rows import CodedRows
from headway_runtime.kernels.triton.codes import EXACT
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)

ORDER_KERNEL, CODES_KERNEL = "expert_ordered_inputs", "expert_coded_inputs"
CANDIDATES = {"default": [{"BLOCK": block, "num_warps": 4} for block in (512, 1024, 2048)]}


@triton.jit
def expert_ordered_inputs_kernel(
    x, chosen, orders, out, x_size, num_inputs, slots_per_row, BLOCK: tl.constexpr
):
    """Grid: slots, blocks of inputs. x: [slots / slots_per_row, x_size]. orders: int64 [experts, inputs]."""
    slot = tl.program_id(0).to(tl.int64)
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = inputs < num_inputs
    expert = tl.load(chosen + slot).to(tl.int64)
    places = tl.load(orders + expert * num_inputs + inputs, mask=is_inside, other=0)
    numbers = tl.load(x + slot // slots_per_row * x_size + places, mask=is_inside, other=0.0)
    tl.store(out + slot * num_inputs + inputs, numbers, mask=is_inside)


@triton.jit
def expert_coded_inputs_kernel(
    x, chosen, scales, zeros, codes, own_scales, own_zeros, num_inputs, slots_per_row, BLOCK: tl.constexpr
):
    """Grid: slots, blocks of inputs. scales, zeros: of experts; own_scales, own_zeros: of slots, written."""
    slot = tl.program_id(0).to(tl.int64)
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = inputs < num_inputs
    expert = tl.load(chosen + slot)
    scale, zero = tl.load(scales + expert), tl.load(zeros + expert)
    numbers = tl.load(x + slot // slots_per_row * num_inputs + inputs, mask=is_inside, other=0.0)
    divided = tl.div_rn(numbers.to(tl.float32), tl.zeros([BLOCK], tl.float32) + scale)
    # As in coded_rows.py: halves to even numbers.
    rounded = (tl.minimum(tl.maximum(divided, -1e5), 1e5) + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(rounded + zero.to(tl.float32), -128.0), 127.0)
    tl.store(codes + slot * num_inputs + inputs, code.to(tl.int8), mask=is_inside)
    if tl.program_id(1) == 0:
        tl.store(own_scales + slot, scale)
        tl.store(own_zeros + slot, zero)


def ordered_inputs(x: Tensor, chosen: Tensor, orders: Tensor, *, slots_per_row: int) -> Tensor:
    """[slots, inputs]. x: [slots / slots_per_row, numbers], contiguous. chosen: int32, of each slot.

    orders: int64 [experts, inputs], which numbers of a row those are.
    """
    num_slots, num_inputs = chosen.numel(), orders.shape[1]
    out = x.new_empty((num_slots, num_inputs))
    if num_slots:
        constants, options = split_options(configuration(ORDER_KERNEL, DEFAULT, gpu_of(x.device)))
        grid = (num_slots, triton.cdiv(num_inputs, constants["BLOCK"]))
        expert_ordered_inputs_kernel[grid](
            x, chosen, orders, out, x.shape[1], num_inputs, slots_per_row, **constants, **options
        )
    return out


def coded_inputs(
    x: Tensor, chosen: Tensor, scales: Tensor, zeros: Tensor, *, slots_per_row: int
) -> CodedRows:
    """int8 [slots, inputs]. x: [slots / slots_per_row, inputs], contiguous. chosen: int32, of each slot.

    scales, zeros: float32 and int32 [experts].
    """
    num_slots, num_inputs = chosen.numel(), x.shape[1]
    codes = torch.empty((num_slots, num_inputs), dtype=torch.int8, device=x.device)
    own_scales, own_zeros = scales.new_empty(num_slots), zeros.new_empty(num_slots)
    if num_slots:
        constants, options = split_options(configuration(CODES_KERNEL, DEFAULT, gpu_of(x.device)))
        grid = (num_slots, triton.cdiv(num_inputs, constants["BLOCK"]))
        expert_coded_inputs_kernel[grid](
            x,
            chosen,
            scales,
            zeros,
            codes,
            own_scales,
            own_zeros,
            num_inputs,
            slots_per_row,
            **constants,
            **options,
            **EXACT,
        )
    return CodedRows(codes, own_scales, own_zeros)


def ordered_reference(x: Tensor, chosen: Tensor, orders: Tensor) -> Tensor:
    """By torch."""
    slots = x.repeat_interleave(chosen.numel() // len(x), 0)
    return slots.gather(1, orders[chosen.flatten().long()])


def coded_reference(x: Tensor, chosen: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The codes, by torch."""
    slots, own = x.float().repeat_interleave(chosen.numel() // len(x), 0), chosen.flatten().long()
    return ((slots / scales[own, None]).round_() + zeros[own, None]).clamp_(-128, 127).to(torch.int8)


def _cases() -> Iterator[CompileCase]:
    sizes = {"num_inputs": "i32:16", "slots_per_row": "i32"}
    for one in configurations(ORDER_KERNEL):
        constants, options = split_options(one.values)
        signature = {"x": "*bf16", "chosen": "*i32", "orders": "*i64", "out": "*bf16", "x_size": "i32:16"}
        kernel = expert_ordered_inputs_kernel
        yield CompileCase(one.label, kernel, signature | sizes, constants, options, one.capabilities)
    for one in configurations(CODES_KERNEL):
        constants, options = split_options(one.values)
        signature = {"x": "*bf16", "chosen": "*i32", "codes": "*i8"}
        signature |= dict.fromkeys(("scales", "own_scales"), "*fp32")
        signature |= dict.fromkeys(("zeros", "own_zeros"), "*i32")
        options |= EXACT
        kernel = expert_coded_inputs_kernel
        yield CompileCase(one.label, kernel, signature | sizes, constants, options, one.capabilities)


COMPILED = list(_cases())

"""Rows of int8 codes times the int8 weights of their experts, all experts in one launch, sums in int32.

Floor: as in expert_product.py, where a weight is a byte: few rows wait for the weights of all experts that
any row wants, 4.7 MB of Qwen3-30B-A3B an expert and layer, and prompts for arithmetic, at twice the rate of
bfloat16. Expected: 75% of bandwidth from some 8 experts on, 50% of the rate for prompts.

Tiles, slots and the activation at the end are those of expert_product.py. Both operands lie with their inputs
side by side, as tensor cores of 8 bits want them, in lines of 128 bytes by asynchronous copies, and nothing
is converted on the way (coded_rows_product.py); weights are the left operand, so that few rows are columns.
What rows are coded by, a scale and maybe a zero point of each, lies beside them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.coded_rows import CodedRows
from headway_runtime.kernels.triton.coded_rows_product import RowWeight
from headway_runtime.kernels.triton.coded_sums import by_turns, gated
from headway_runtime.kernels.triton.expert_order import ExpertOrder
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    configuration,
    configurations,
    dot,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.row_products import MANY_ROWS, class_of_rows
from headway_runtime.model_config import Activation

KERNEL = "expert_rows_product"
CANDIDATES = {
    "rows_8": [
        {"block_outputs": outputs, "block_rows": rows, "num_warps": 4, "num_stages": stages}
        for outputs in (64, 128)
        for rows in (8, 16)
        for stages in (3, 5)
    ],
    MANY_ROWS: [
        {"block_outputs": outputs, "block_rows": rows, "num_warps": warps, "num_stages": 3}
        for outputs, rows, warps in ((64, 64, 4), (128, 64, 4), (128, 128, 8))
    ],
}


@dataclass(frozen=True, slots=True)
class ExpertRowWeights:
    """codes: int8 [experts, outputs, inputs]. scales: float32 [experts, outputs].

    sums: int32 [experts, outputs], of each output's codes; None where no row has a zero point.
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor | None

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]


def stacked_rows(weights: Sequence[RowWeight]) -> ExpertRowWeights:
    """One weight of each expert, all int8 and of one shape, with sums or without."""
    sums = [weight.sums for weight in weights if weight.sums is not None]
    codes, scales = (torch.stack([getattr(one, name) for one in weights]) for name in ("codes", "scales"))
    return ExpertRowWeights(codes, scales, torch.stack(sums) if sums else None)


def row_weight_of(weights: ExpertRowWeights, number: int) -> RowWeight:
    """One expert's own, without a copy."""
    sums = None if weights.sums is None else weights.sums[number]
    return RowWeight(weights.codes[number], weights.scales[number], sums)


# What changes from step to step makes no new kernel.
@triton.jit(do_not_specialize=["num_tiles", "slots_per_row"])
def expert_rows_product_kernel(
    x,
    x_scales,
    x_zeros,
    codes,
    scales,
    sums,
    order,
    tiles,
    out,
    num_outputs,
    num_inputs,
    num_tiles,
    slots_per_row,
    fills_blocks: tl.constexpr,
    activation: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Grid: tiles of slots within tiles of outputs. x: int8 [slots / slots_per_row, num_inputs].

    x_scales, x_zeros: of its rows. activation, out: as in expert_product.py.
    """
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(tiles + tile)
    if expert >= 0:
        first = tl.load(tiles + num_tiles + tile)
        end = tl.load(tiles + 2 * num_tiles + tile)
        places = first + tl.arange(0, block_rows)
        is_slot = places < end
        # What is past the end reads the first slot's row, so that no load needs a mask.
        slots = tl.load(order + places, mask=is_slot, other=0)
        rows = (slots // slots_per_row).to(tl.int64)
        outputs = tl.program_id(0) // num_tiles * block_outputs + tl.arange(0, block_outputs)
        own = tl.minimum(outputs, num_outputs - 1) if activation is None else by_turns(outputs, num_outputs)
        own = expert.to(tl.int64) * num_outputs + own
        inputs = tl.arange(0, 128)
        codes_at = codes + own[:, None] * num_inputs + inputs[None, :]
        x_at = x + rows[None, :] * num_inputs + inputs[:, None]
        total = tl.zeros([block_outputs, block_rows], tl.int32)
        for block in range(0, num_inputs, 128):
            if fills_blocks:
                left = tl.load(codes_at + block)
                right = tl.load(x_at + block)
            else:
                is_input = block + inputs < num_inputs
                left = tl.load(codes_at + block, mask=is_input[None, :], other=0)
                right = tl.load(x_at + block, mask=is_input[:, None], other=0)
            total = dot(left, right, total)
        if x_zeros is not None:
            total -= tl.load(sums + own)[:, None] * tl.load(x_zeros + rows)[None, :]
        result = total.to(tl.float32) * (tl.load(scales + own)[:, None] * tl.load(x_scales + rows)[None, :])
        width = num_outputs
        if activation is not None:
            width = num_outputs // 2
            outputs = tl.program_id(0) // num_tiles * (block_outputs // 2) + tl.arange(0, block_outputs // 2)
            result = gated(result, activation, out.dtype.element_ty, block_outputs, block_rows)
        out_at = out + slots.to(tl.int64)[None, :] * width + outputs[:, None]
        is_inside = (outputs < width)[:, None] & is_slot[None, :]
        tl.store(out_at, narrow(result, out.dtype.element_ty), mask=is_inside)


def row_tile_rows(weights: ExpertRowWeights, num_slots: int) -> int:
    """How many slots of an expert a program takes."""
    return _values(weights, num_slots)["block_rows"]


def expert_rows_product(
    x: CodedRows,
    weights: ExpertRowWeights,
    order: ExpertOrder,
    dtype: torch.dtype,
    *,
    slots_per_row: int,
    activation: Activation | None = None,
) -> Tensor:
    """[slots, outputs] of `dtype`, or half of them with `activation`. x: [slots / slots_per_row, inputs]."""
    num_slots, num_tiles = len(order.order), order.tiles.shape[1]
    _, num_outputs, num_inputs = weights.codes.shape
    width = num_outputs if activation is None else num_outputs // 2
    out = torch.empty((num_slots, width), dtype=dtype, device=x.codes.device)
    if not num_slots:
        return out
    constants, options = split_options(_values(weights, num_slots))
    num_output_tiles = triton.cdiv(num_outputs, constants["block_outputs"])
    expert_rows_product_kernel[(num_tiles * num_output_tiles,)](
        x.codes,
        x.scales,
        x.zeros,
        weights.codes,
        weights.scales,
        weights.sums,
        order.order,
        order.tiles,
        out,
        num_outputs,
        num_inputs,
        num_tiles,
        slots_per_row,
        fills_blocks=num_inputs % 128 == 0,
        activation=activation,
        **constants,
        **options,
    )
    return out


def _values(weights: ExpertRowWeights, num_slots: int) -> dict[str, int]:
    rows = -(-num_slots // weights.num_experts)
    return configuration(KERNEL, class_of_rows(rows), gpu_of(weights.codes.device))


def rows_product_reference(x: CodedRows, weights: ExpertRowWeights, chosen: Tensor) -> Tensor:
    """float64 [slots, outputs]. x: of rows or slots. chosen: [rows, used]."""
    zeros = 0 if x.zeros is None else x.zeros.double()[:, None]
    plain = (x.codes.double() - zeros) * x.scales.double()[:, None]
    slots = plain.repeat_interleave(chosen.numel() // len(plain), 0)
    weight = weights.codes.double() * weights.scales.double()[..., None]
    return torch.einsum("si,soi->so", slots, weight[chosen.flatten().long()])


def _cases() -> Iterator[CompileCase]:
    for one in configurations(KERNEL):
        constants, options = split_options(one.values)
        for has_zeros in (False, True) if one.shape_class == MANY_ROWS else (False,):
            signature = {"x": "*i8", "codes": "*i8", "x_scales": "*fp32", "scales": "*fp32", "out": "*bf16"}
            signature |= dict.fromkeys(("order", "tiles"), "*i32")
            signature |= dict.fromkeys(("num_tiles", "slots_per_row"), "i32")
            signature |= dict.fromkeys(("num_outputs", "num_inputs"), "i32:16")
            own: dict[str, object] = {"fills_blocks": True, "activation": "silu", **constants}
            if has_zeros:
                signature |= {"x_zeros": "*i32", "sums": "*i32"}
            else:
                own |= {"x_zeros": None, "sums": None}
            yield CompileCase(
                f"{one.label} {'zeros' if has_zeros else 'symmetric'}",
                expert_rows_product_kernel,
                signature,
                own,
                options,
                one.capabilities,
            )


COMPILED = list(_cases())

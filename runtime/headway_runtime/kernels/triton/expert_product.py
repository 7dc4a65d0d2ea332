"""x @ weight.T of each row with the weights of its experts, all experts in one launch.

Decode waits for weights: every expert that any row wants is read once, 2 * outputs * inputs bytes of bfloat16
and half or a quarter in codes. Qwen3-30B-A3B in bfloat16 reads 9.4 MB an expert and layer, 75 MB for one row:
17.5 us at 4.3 TB/s; from 64 rows on nearly all 128 experts, 1.2 GB and 280 us. Prompts wait for arithmetic, 6
* slots * size * hidden operations. Expected: 75% of bandwidth from some 8 experts on, 50% of the matrix rate
for prompts, of which padding each expert's rows to whole tiles takes a part.

A program multiplies up to `block_rows` rows of one expert with `block_outputs` of its outputs; the weight is
the left operand, as in coded_product.py, so few rows are columns and padded to 8 only. Rows are gathered
where they lie, by asynchronous copies of 16 bytes and more, and results go to their slots: nothing is moved
first or put back. The first product of a gated MLP takes outputs of gate and up by turns, so that a program
has both and stores activation(gate) * up: a launch and its trip through memory less.

Tiles of one expert that read the same weights are neighbours in the grid. Weights are lines of 128 bytes of
an output (plain, fp8), or words as in coded_weight.py, each expert's behind the other's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.coded_sums import by_turns, gated, sums_of_codes
from headway_runtime.kernels.triton.coded_weight import CodedWeight
from headway_runtime.kernels.triton.expert_order import ExpertOrder
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    Configuration,
    configuration,
    configurations,
    dot,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.row_products import MANY_ROWS, class_of_rows
from headway_runtime.model_config import Activation

KERNELS = {
    "plain": "expert_product_plain",
    "float32": "expert_product_float32",
    "int4": "expert_product_int4",
}
KERNELS |= dict.fromkeys(("int8", "fp8"), "expert_product_8bit")
CANDIDATES = {
    "rows_8": [
        {"block_outputs": outputs, "block_rows": rows, "num_warps": 4, "num_stages": stages}
        for outputs in (64, 128)
        for rows in (8, 16)
        for stages in (3, 4)
    ],
    MANY_ROWS: [
        {"block_outputs": outputs, "block_rows": rows, "num_warps": warps, "num_stages": 3}
        for outputs, rows, warps in ((64, 64, 4), (128, 64, 4), (128, 128, 8))
    ],
}


# Three products of tf32 for each of float32 take many registers.
FLOAT32_CANDIDATES = [
    {"block_outputs": 32, "block_rows": 16, "num_warps": warps, "num_stages": stages}
    for warps in (2, 4)
    for stages in (2, 3)
]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Alike weights of all experts, one behind the other.

    plain: [experts, outputs, inputs], or None for codes.
    coded: one expert's shape and form, with the codes and meanings of all: [experts, ...].
    """

    num_experts: int
    num_outputs: int
    num_inputs: int
    plain: Tensor | None
    coded: CodedWeight | None

    @property
    def form(self) -> Literal["plain", "int4", "int8", "fp8"]:
        return "plain" if self.coded is None else self.coded.form


def stacked_codes(weights: Sequence[CodedWeight]) -> ExpertWeights:
    """One weight of each expert, all of one form and shape."""
    first = weights[0]
    codes = torch.stack([weight.codes.view(torch.uint8) for weight in weights]).view(first.codes.dtype)
    meanings = torch.stack([weight.meanings for weight in weights])
    coded = replace(first, codes=codes, meanings=meanings)
    return ExpertWeights(len(weights), first.num_outputs, first.num_inputs, None, coded)


def expert_of(weights: ExpertWeights, number: int) -> CodedWeight:
    """One expert's own, without a copy."""
    coded = weights.coded
    assert coded is not None
    return replace(coded, codes=coded.codes[number], meanings=coded.meanings[number])


# What changes from step to step makes no new kernel.
@triton.jit(do_not_specialize=["num_tiles", "slots_per_row"])
def expert_product_kernel(
    x,
    codes,
    meanings,
    order,
    tiles,
    out,
    num_outputs,
    num_inputs,
    num_tiles,
    codes_stride,
    meanings_stride,
    slots_per_row,
    form: tl.constexpr,
    meaning: tl.constexpr,
    group_size: tl.constexpr,
    scale_rows: tl.constexpr,
    fills_blocks: tl.constexpr,
    activation: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Grid: tiles of slots within tiles of outputs. x: [slots / slots_per_row, num_inputs], contiguous.

    activation: None, or that of a gated MLP: outputs are those of the gate, then as many of up, and out is
    [slots, num_outputs / 2]; else [slots, num_outputs]. codes: words, or plain numbers for form plain.
    """
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(tiles + tile)
    if expert >= 0:
        first = tl.load(tiles + num_tiles + tile)
        end = tl.load(tiles + 2 * num_tiles + tile)
        places = first + tl.arange(0, block_rows)
        is_slot = places < end
        slots = tl.load(order + places, mask=is_slot, other=0)
        x_rows = x + (slots // slots_per_row).to(tl.int64) * num_inputs
        outputs = tl.program_id(0) // num_tiles * block_outputs + tl.arange(0, block_outputs)
        own = tl.minimum(outputs, num_outputs - 1) if activation is None else by_turns(outputs, num_outputs)
        codes_of = codes + expert.to(tl.int64) * codes_stride
        if form == "plain":
            total = sums_of_numbers(
                x_rows, is_slot[None, :], codes_of, own, num_inputs, fills_blocks, block_outputs, block_rows
            )
        else:
            total = sums_of_codes(
                x_rows,
                is_slot[None, :],
                codes_of,
                meanings + expert.to(tl.int64) * meanings_stride,
                own,
                num_outputs,
                num_inputs,
                0,
                tl.cdiv(num_inputs, 128),
                form,
                meaning,
                group_size,
                scale_rows,
                fills_blocks,
                block_outputs,
                block_rows,
            )
        if activation is None:
            width = num_outputs
            result = total
        else:
            width = num_outputs // 2
            outputs = tl.program_id(0) // num_tiles * (block_outputs // 2) + tl.arange(0, block_outputs // 2)
            result = gated(total, activation, out.dtype.element_ty, block_outputs, block_rows)
        out_at = out + slots.to(tl.int64)[None, :] * width + outputs[:, None]
        is_inside = (outputs < width)[:, None] & is_slot[None, :]
        tl.store(out_at, narrow(result, out.dtype.element_ty), mask=is_inside)


@triton.jit
def sums_of_numbers(
    x_rows,
    is_row,
    weight,
    own,
    num_inputs,
    fills_blocks: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
):
    """As `sums_of_codes`, of a plain weight [outputs, inputs]."""
    places = tl.arange(0, 64)
    weight_at = weight + own.to(tl.int64)[:, None] * num_inputs + places[None, :]
    x_at = x_rows[None, :] + places[:, None]
    total = tl.zeros([block_outputs, block_rows], tl.float32)
    for first in range(0, num_inputs, 64):
        if fills_blocks:
            numbers = tl.load(weight_at + first)
            columns = tl.load(x_at + first, mask=is_row, other=0.0)
        else:
            is_input = first + places < num_inputs
            numbers = tl.load(weight_at + first, mask=is_input[None, :], other=0.0)
            columns = tl.load(x_at + first, mask=is_row & is_input[:, None], other=0.0)
        total = dot(numbers, columns, total)
    return total


def tile_rows(weights: ExpertWeights, num_slots: int) -> int:
    """How many slots of an expert a program takes, which both products of a gated MLP must agree on."""
    return _values(weights, num_slots)["block_rows"]


def expert_product(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    *,
    slots_per_row: int,
    activation: Activation | None = None,
) -> Tensor:
    """[slots, outputs], or half of them with `activation`. x: [slots / slots_per_row, inputs], contiguous."""
    num_slots, num_tiles = len(order.order), order.tiles.shape[1]
    width = weights.num_outputs if activation is None else weights.num_outputs // 2
    out = x.new_empty((num_slots, width))
    if not num_slots:
        return out
    constants, options = split_options(_values(weights, num_slots))
    codes, meanings, form = _operands(weights)
    num_output_tiles = triton.cdiv(weights.num_outputs, constants["block_outputs"])
    expert_product_kernel[(num_tiles * num_output_tiles,)](
        x,
        codes,
        meanings,
        order.order,
        order.tiles,
        out,
        weights.num_outputs,
        weights.num_inputs,
        num_tiles,
        codes.stride(0),
        0 if meanings is None else meanings.stride(0),
        slots_per_row,
        **form,
        fills_blocks=weights.num_inputs % 128 == 0,
        activation=activation,
        **constants,
        **options,
    )
    return out


def _values(weights: ExpertWeights, num_slots: int) -> dict[str, int]:
    device = (weights.plain if weights.coded is None else weights.coded.codes).device  # type: ignore[union-attr]
    rows = -(-num_slots // weights.num_experts)
    form = "float32" if weights.plain is not None and weights.plain.dtype == torch.float32 else weights.form
    return configuration(KERNELS[form], class_of_rows(rows), gpu_of(device))


def _operands(weights: ExpertWeights) -> tuple[Tensor, Tensor | None, dict[str, object]]:
    coded = weights.coded
    if coded is None:
        assert weights.plain is not None
        return weights.plain, None, _form("plain", "float32", 0, 1)
    codes = coded.codes.view(torch.int16)
    return codes, coded.meanings, _form(coded.form, coded.meaning, coded.group_size, coded.scale_rows)


def _form(form: str, meaning: str, group_size: int, scale_rows: int) -> dict[str, object]:
    return {"form": form, "meaning": meaning, "group_size": group_size, "scale_rows": scale_rows}


def product_reference(
    x: Tensor, weight: Tensor, chosen: Tensor, *, activation: Activation | None = None
) -> Tensor:
    """float32 [slots, outputs]. weight: float32 [experts, outputs, inputs]. x: [rows or slots, inputs].

    chosen: [rows, used].
    """
    slots = x.float().repeat_interleave(chosen.numel() // len(x), 0)
    out = torch.einsum("si,soi->so", slots, weight[chosen.flatten().long()])
    if activation is None:
        return out
    gate, up = out.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _cases() -> Iterator[CompileCase]:
    for one in configurations(KERNELS["float32"]):
        yield _case(one, _form("plain", "float32", 0, 1), "silu", number="fp32")
    for form, meaning, group_size in (
        ("plain", "float32", 0),
        ("int4", "float16", 128),
        ("fp8", "float32", 128),
        ("fp8", "float32", 64),
        ("fp8", "float32", 32),
        ("int8", "float32", 0),
    ):
        for one in configurations(KERNELS[form]):
            if one.shape_class == MANY_ROWS or (form != "int8" and group_size != 32):
                yield _case(one, _form(form, meaning, group_size, 128 if form == "fp8" else 1), "silu")
            if form == "plain" and one.shape_class == MANY_ROWS:
                yield _case(one, _form(form, meaning, group_size, 1), None)


def _case(
    one: Configuration, form: dict[str, object], activation: Activation | None, *, number: str = "bf16"
) -> CompileCase:
    constants, options = split_options(one.values)
    is_plain = form["form"] == "plain"
    signature = {"x": f"*{number}", "codes": f"*{number}" if is_plain else "*i16", "out": f"*{number}"}
    signature |= dict.fromkeys(("order", "tiles"), "*i32") | dict.fromkeys(
        ("num_tiles", "slots_per_row"), "i32"
    )
    sizes = ("num_outputs", "num_inputs", "codes_stride", "meanings_stride")
    signature |= dict.fromkeys(sizes, "i32:16")
    own: dict[str, object] = {**form, "fills_blocks": True, "activation": activation, **constants}
    if is_plain:
        own["meanings"] = None
    else:
        signature["meanings"] = "*i32" if form["meaning"] == "float16" else "*fp32"
    end = "alone" if activation is None else "gated"
    label = f"{one.label} {form['form']} groups of {form['group_size']} {end}"
    return CompileCase(label, expert_product_kernel, signature, own, options, one.capabilities)


COMPILED = list(_cases())

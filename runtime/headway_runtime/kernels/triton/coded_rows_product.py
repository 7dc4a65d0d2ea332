"""x @ weight.T where both are 8-bit codes: int8 with int32 sums, and fp8 (e4m3) with scales of blocks.

Floor: 2 * rows * outputs * inputs operations at 1979e12 a second (an H200's dense 8-bit rate by the
datasheet), or the weight's bytes for few rows: 28672 * 4096 of them are 27 us at 4.3 TB/s, and as many
operations at 460 rows. Expected: 60% of the rate for many rows, 75% of bandwidth for few.

Both operands lie with their inputs side by side, as tensor cores of 8 bits want them, and are read in lines
of 128 bytes of a row by asynchronous copies; nothing is converted on the way. Sums of fp8 are kept by
Hopper's tensor cores with 14 bits, so every 128 inputs they are added to a float32 one, where scales of
blocks are due in any case. Few rows make few programs, so inputs are split (see row_products.py).

fp8 with a scale of each row and output goes through `torch._scaled_mm`, which is as fast as can be; see
layers/coded_linear.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.coded_rows import CodedRows
from headway_runtime.kernels.triton.codes import as_bytes
from headway_runtime.kernels.triton.launch import (
    INTERPRETED,
    CompileCase,
    Gpu,
    configuration,
    configurations,
    dot,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.row_products import (
    MANY_ROWS,
    arrives_last,
    class_of_rows,
    filled,
    own_blocks,
    split_counters,
    splits_of,
    summed_splits,
)
from headway_runtime.kernels.triton.widening import float8_operand

KERNEL = "coded_rows_product"
BLOCK_INPUTS = 128
FP8_CAPABILITY = 90
CANDIDATES = {
    "rows_16": [
        {
            "BLOCK_ROWS": 16,
            "BLOCK_OUTPUTS": outputs,
            "programs": programs,
            "num_warps": 4,
            "num_stages": stages,
        }
        for outputs in (32, 64, 128)
        for programs in (2, 4)
        for stages in (3, 5)
    ],
    MANY_ROWS: [
        {
            "BLOCK_ROWS": rows,
            "BLOCK_OUTPUTS": outputs,
            "programs": 1,
            "num_warps": warps,
            "num_stages": stages,
        }
        for rows, outputs, warps in ((64, 128, 4), (128, 64, 4), (128, 128, 8))
        for stages in (3, 4)
    ],
}


@dataclass(frozen=True, slots=True)
class RowWeight:
    """codes: int8 or float8_e4m3fn [outputs, inputs].

    scales: float32 [outputs], or [outputs / 128, inputs / 128] rounded up for blocks.
    sums: int32 [outputs], of each output's codes; None where no row has a zero point.
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor | None = None


# What changes from step to step makes no new kernel.
@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def coded_rows_product_kernel(
    x,
    x_scales,
    x_zeros,
    codes,
    scales,
    sums,
    bias,
    out,
    partials,
    arrivals,
    num_rows,
    num_outputs,
    num_inputs,
    num_splits,
    IS_INT8: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    FILLS_BLOCKS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Grid: tiles of rows within tiles of outputs, splits. x: [num_rows, num_inputs]; the rest: `RowWeight`.

    HAS_BLOCKS: x_scales are of 128 inputs of a row, scales of 128 outputs and inputs; BLOCK_OUTPUTS divides
    128. fp8 is for more than 64 rows, fewer wait for bytes alone: see coded_product.py.
    """
    tile = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    rows = tile % num_row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = tile // num_row_tiles * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    places = tl.arange(0, 128)
    # What is past the end reads the last row or output, so that no load needs a mask.
    own_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    own_outputs = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    x_at = x + own_rows[:, None] * num_inputs + places[None, :]
    codes_at = codes + own_outputs[None, :] * num_inputs + places[:, None]
    num_blocks = tl.cdiv(num_inputs, 128)
    x_scales_at = x_scales + own_rows * (num_blocks if HAS_BLOCKS else 1)
    of_tile = tile // num_row_tiles * BLOCK_OUTPUTS // 128 * num_blocks
    first, end = own_blocks(num_blocks, tl.program_id(1), num_splits)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.int32 if IS_INT8 else tl.float32)
    for block in range(first, end):
        if FILLS_BLOCKS:
            left = tl.load(x_at + block * 128)
            right = tl.load(codes_at + block * 128)
        else:
            is_input = block * 128 + places < num_inputs
            left = tl.load(x_at + block * 128, mask=is_input[None, :], other=0)
            right = tl.load(codes_at + block * 128, mask=is_input[:, None], other=0)
        if IS_INT8:
            total = dot(left, right, total)
        elif HAS_BLOCKS:
            # Outputs of one tile are of one block.
            of_rows = tl.load(x_scales_at + block) * tl.load(scales + of_tile + block)
            part = dot(float8_operand(left), float8_operand(right), tl.zeros_like(total))
            total += part * of_rows[:, None]
        else:
            total += dot(float8_operand(left), float8_operand(right), tl.zeros_like(total))

    is_inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    is_last = True
    if HAS_SPLITS:
        is_last = arrives_last(
            total,
            partials,
            arrivals,
            tile,
            tl.program_id(1),
            num_splits,
            is_inside,
            BLOCK_ROWS,
            BLOCK_OUTPUTS,
        )
    if is_last:
        if HAS_SPLITS:
            total = summed_splits(
                total, partials, arrivals, tile, num_splits, is_inside, BLOCK_ROWS, BLOCK_OUTPUTS
            )
        if x_zeros is not None:
            total -= tl.load(x_zeros + own_rows)[:, None] * tl.load(sums + own_outputs)[None, :]
        result = total.to(tl.float32)
        if not HAS_BLOCKS:
            result *= tl.load(x_scales_at)[:, None] * tl.load(scales + own_outputs)[None, :]
        if bias is not None:
            result += tl.load(bias + own_outputs).to(tl.float32)[None, :]
        out_at = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        tl.store(out_at, narrow(result, out.dtype.element_ty), mask=is_inside)


class CodedRowsProduct:
    """Launches the kernel for one weight. Not for two streams at once: splits meet in its counters."""

    __slots__ = ("_arrivals", "_bias", "_gpu", "num_inputs", "num_outputs", "weight")

    def __init__(self, weight: RowWeight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        self.num_outputs, self.num_inputs = weight.codes.shape
        self._gpu = gpu_of(weight.codes.device)
        self._arrivals = split_counters(self._gpu, weight.codes.device)

    def __call__(self, x: CodedRows, dtype: torch.dtype) -> Tensor:
        """[rows, outputs] of `dtype`."""
        num_rows, weight = len(x.codes), self.weight
        out = torch.empty((num_rows, self.num_outputs), dtype=dtype, device=x.codes.device)
        if not num_rows:
            return out
        values = configuration(KERNEL, class_of_rows(num_rows), self._gpu)
        programs = values.pop("programs")
        constants, options = split_options(values)
        tiles = triton.cdiv(num_rows, constants["BLOCK_ROWS"])
        tiles *= triton.cdiv(self.num_outputs, constants["BLOCK_OUTPUTS"])
        num_blocks = triton.cdiv(self.num_inputs, BLOCK_INPUTS)
        num_splits = 1
        if tiles <= len(self._arrivals):
            num_splits = splits_of(tiles, num_blocks, programs, self._gpu)
            num_splits = filled(num_splits, num_blocks)
        is_int8 = weight.codes.dtype == torch.int8
        tile_size = constants["BLOCK_ROWS"] * constants["BLOCK_OUTPUTS"]
        sums = torch.int32 if is_int8 else torch.float32
        partials = None
        if num_splits > 1:
            partials = torch.empty(tiles * num_splits * tile_size, dtype=sums, device=out.device)
        coded_rows_product_kernel[(tiles, num_splits)](
            as_bytes(x.codes) if INTERPRETED else x.codes,
            x.scales,
            x.zeros,
            as_bytes(weight.codes) if INTERPRETED else weight.codes,
            weight.scales,
            weight.sums,
            self._bias,
            out,
            partials,
            self._arrivals,
            num_rows,
            self.num_outputs,
            self.num_inputs,
            num_splits,
            IS_INT8=is_int8,
            HAS_BLOCKS=x.scales.dim() == 2,
            FILLS_BLOCKS=self.num_inputs % BLOCK_INPUTS == 0,
            HAS_SPLITS=num_splits > 1,
            **constants,
            **options,
        )
        return out


def can_multiply_fp8(gpu: Gpu) -> bool:
    return gpu.capability >= FP8_CAPABILITY


def product_reference(x: CodedRows, weight: RowWeight, bias: Tensor | None) -> Tensor:
    """float64 by torch."""
    scales, of_rows = weight.scales.double(), x.scales.double()
    if x.scales.dim() == 2:
        of_rows = of_rows.repeat_interleave(BLOCK_INPUTS, 1)
        scales = scales.repeat_interleave(BLOCK_INPUTS, 0)[: len(weight.codes)]
        scales = scales.repeat_interleave(BLOCK_INPUTS, 1)
    else:
        of_rows, scales = of_rows[:, None], scales[:, None]
    zeros = 0 if x.zeros is None else x.zeros.double()[:, None]
    plain = (x.codes.double() - zeros) * of_rows
    out = plain @ (weight.codes.double() * scales).t()
    return out if bias is None else out + bias.double()


def _cases() -> Iterator[CompileCase]:
    for one in configurations(KERNEL):
        values = dict(one.values)
        has_splits = values.pop("programs") > 1
        constants, options = split_options(values)
        for form in ("int8", "int8 with zeros", "fp8 blocks"):
            is_fp8, has_zeros = form == "fp8 blocks", form == "int8 with zeros"
            if form != "int8" and one.shape_class != MANY_ROWS:
                continue
            byte = "*fp8e4nv" if is_fp8 else "*i8"
            signature = {"x": byte, "codes": byte, "x_scales": "*fp32", "scales": "*fp32", "out": "*bf16"}
            signature |= {"arrivals": "*i32", "num_rows": "i32", "num_splits": "i32"}
            signature |= {"num_outputs": "i32:16", "num_inputs": "i32:16"}
            own: dict[str, object] = {
                "IS_INT8": not is_fp8,
                "HAS_BLOCKS": is_fp8,
                "FILLS_BLOCKS": True,
                "HAS_SPLITS": has_splits,
                "bias": None,
                **constants,
            }
            if has_zeros:
                signature |= {"x_zeros": "*i32", "sums": "*i32"}
            else:
                own |= {"x_zeros": None, "sums": None}
            if has_splits:
                signature["partials"] = "*fp32" if is_fp8 else "*i32"
            else:
                own["partials"] = None
            yield CompileCase(
                f"{one.label} {form}",
                coded_rows_product_kernel,
                signature,
                own,
                options,
                tuple(each for each in one.capabilities if not is_fp8 or each >= FP8_CAPABILITY),
            )


COMPILED = list(_cases())

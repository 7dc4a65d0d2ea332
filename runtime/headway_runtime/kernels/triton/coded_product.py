"""x @ weight.T where the weight is 4- or 8-bit codes and x is not: few rows, for which only bytes count.

Floor: inputs * outputs / 2 bytes (4 bits) or inputs * outputs (8 bits) over the bandwidth of memory. A merged
gate and up projection of an 8B Llama (28672 outputs of 4096 inputs) in 4 bits with a scale of 128 inputs is
58.7 MB, and 3.7 MB of scales and zero points: 14.5 us at 4.3 TB/s.

Why the products are those of tensor cores even for one row: an H200 issues 132 * 128 * 1.75 GHz = 30e12
instructions of one lane a second, and 4.3 TB/s are 8.6e12 weights of 4 bits: 3.4 instructions for each, 6.9
for each of 8. To shift, mask, subtract, widen to float32 and multiply-add takes 4.5; as pairs of bfloat16 for
tensor cores it is 1.5 for the codes (see widening.py) and 1/8 for the product. So the weight is the left
operand, in registers where its codes became numbers, and x the right one, whose columns are padded to 8:
out.T = weight @ x.T. Measured on an H200, one row of Llama-3.1-8B: int4 22.7 us for gate and up (65% of its
bytes' time), 13.6 down (54%), 8.3 and 7.0 for the small ones; fp8 31.8 (87%), 19.3 (72%), 11.4 and 8.3. What
is missing is the start, and the trip that splits' sums take through memory.

Why two warps for few rows: with four or more the compiler takes Hopper's products of warp groups, which want
a fence before and a wait after each. Its loop is then 254 instructions of a warp for 64 weights a thread, 4.0
for each of 4 bits, above what there is time for. Two warps with 128 outputs take 531 for 256 weights, 2.1
(with 64 outputs 2.4, fp8 3.6, int8 2.7), counted in the machine code for sm_90. From 32 rows on the warp
groups' rate is worth it.

A scale multiplies the float32 sum of its group's products, not the weights: less work, and no rounding.
Codes, meanings and x come by asynchronous copies `num_stages` deep; a weight that makes few programs has its
inputs split (see row_products.py). Up to some hundred rows tiles are larger and the rows of a weight are read
once for each 128 of them; beyond that `coded_plain.py` turns the weight into plain numbers for cuBLAS, since
widening again for each 128 rows then costs more than that.

The layout and why its loads are whole lines: see coded_weight.py.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.coded_sums import by_turns, gated, sums_of_codes
from headway_runtime.kernels.triton.coded_weight import CodedWeight
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    Configuration,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import let_next_begin, lets_next_begin
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
from headway_runtime.model_config import Activation

KERNELS = {"int4": "coded_product_int4", "int8": "coded_product_int8", "fp8": "coded_product_fp8"}
# What `benchmarks/gpu/tune.py` tries.
CANDIDATES = {
    "rows_8": [
        {
            "block_outputs": outputs,
            "block_rows": 8,
            "programs": programs,
            "num_warps": warps,
            "num_stages": stages,
        }
        for outputs, warps in ((32, 1), (64, 1), (64, 2), (128, 2), (128, 4))
        for programs in (2, 4, 6)
        for stages in (3, 4, 6)
    ],
    "rows_16": [
        {
            "block_outputs": outputs,
            "block_rows": 16,
            "programs": programs,
            "num_warps": warps,
            "num_stages": stages,
        }
        for outputs, warps in ((64, 2), (128, 2), (128, 4))
        for programs in (2, 4)
        for stages in (3, 4, 5)
    ],
    MANY_ROWS: [
        {"block_outputs": outputs, "block_rows": rows, "programs": 1, "num_warps": warps, "num_stages": 3}
        for outputs, rows, warps in ((64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 8))
    ],
}
CANDIDATES["rows_1"] = CANDIDATES["rows_8"]
CANDIDATES["rows_32"] = [{**one, "block_rows": 32} for one in CANDIDATES["rows_16"]]
CANDIDATES["rows_64"] = [{**one, "block_rows": 64} for one in CANDIDATES["rows_16"] if one["num_warps"] > 2]


# What changes from step to step makes no new kernel.
@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def coded_product_kernel(
    x,
    codes,
    meanings,
    bias,
    out,
    partials,
    arrivals,
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    x_stride,
    num_splits,
    form: tl.constexpr,
    meaning: tl.constexpr,
    group_size: tl.constexpr,
    scale_rows: tl.constexpr,
    fills_blocks: tl.constexpr,
    has_splits: tl.constexpr,
    activation: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Grid: tiles of rows within tiles of outputs (those read the same codes), splits.

    x: [num_rows, num_inputs], rows `x_stride` apart. out: [num_rows, num_outputs], or half of them with an
    activation: see coded_sums.py. The rest: `CodedWeight`.
    """
    let_next_begin(overlaps)
    tile = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, block_rows)
    outputs = tile // num_row_tiles * block_outputs + tl.arange(0, block_outputs)
    rows = tile % num_row_tiles * block_rows + tl.arange(0, block_rows)
    first, end = own_blocks(num_blocks, tl.program_id(1), num_splits)
    is_row = (rows < num_rows)[None, :]
    # Outputs past the end read the last one's codes, so that no load needs a mask.
    own = tl.minimum(outputs, num_outputs - 1) if activation is None else by_turns(outputs, num_outputs)
    total = sums_of_codes(
        x + rows.to(tl.int64) * x_stride,
        is_row,
        codes,
        meanings,
        own,
        num_outputs,
        num_inputs,
        first,
        end,
        form,
        meaning,
        group_size,
        scale_rows,
        fills_blocks,
        block_outputs,
        block_rows,
    )

    is_inside = (outputs < num_outputs)[:, None] & is_row
    is_last = True
    if has_splits:
        split = tl.program_id(1)
        is_last = arrives_last(
            total, partials, arrivals, tile, split, num_splits, is_inside, block_outputs, block_rows
        )
    if is_last:
        sums = total
        if has_splits:
            sums = summed_splits(
                total, partials, arrivals, tile, num_splits, is_inside, block_outputs, block_rows
            )
        if bias is not None:
            sums += tl.load(bias + own).to(tl.float32)[:, None]
        if activation is None:
            width, columns, result = num_outputs, outputs, sums
        else:
            width = num_outputs // 2
            columns = tile // num_row_tiles * (block_outputs // 2) + tl.arange(0, block_outputs // 2)
            result = gated(sums, activation, out.dtype.element_ty, block_outputs, block_rows)
        out_at = out + rows.to(tl.int64)[None, :] * width + columns[:, None]
        tl.store(out_at, narrow(result, out.dtype.element_ty), mask=(columns < width)[:, None] & is_row)


class CodedProduct:
    """Launches the kernel for one weight. Not for two streams at once: splits meet in its counters."""

    __slots__ = ("_arrivals", "_bias", "_constants", "_gpu", "num_inputs", "num_outputs", "weight")

    def __init__(self, weight: CodedWeight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        self.num_outputs, self.num_inputs = weight.num_outputs, weight.num_inputs
        device = weight.codes.device
        self._gpu = gpu_of(device)
        self._arrivals = split_counters(self._gpu, device)
        self._constants = _constants(weight)

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """[rows, outputs], or of a merged gate and up projection activation(gate) * up.

        x: [rows, inputs] of float16, bfloat16 or float32.
        """
        weight, num_rows = self.weight, len(x)
        out = x.new_empty((num_rows, self.num_outputs if activation is None else self.num_outputs // 2))
        if not num_rows:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        values = configuration(KERNELS[weight.form], class_of_rows(num_rows), self._gpu)
        programs = values.pop("programs")
        constants, options = split_options(values)
        num_tiles = triton.cdiv(self.num_outputs, constants["block_outputs"]) * triton.cdiv(
            num_rows, constants["block_rows"]
        )
        num_splits = 1
        if num_tiles <= len(self._arrivals):
            num_splits = splits_of(num_tiles, weight.num_blocks, programs, self._gpu)
            num_splits = filled(num_splits, weight.num_blocks)
        tile_size = constants["block_outputs"] * constants["block_rows"]
        partials = (
            x.new_empty(num_tiles * num_splits * tile_size, dtype=torch.float32) if num_splits > 1 else None
        )
        coded_product_kernel[(num_tiles, num_splits)](
            x,
            weight.codes.view(torch.int16),
            weight.meanings,
            self._bias,
            out,
            partials,
            self._arrivals,
            num_rows,
            self.num_outputs,
            self.num_inputs,
            weight.num_blocks,
            x.stride(0),
            num_splits,
            **self._constants,
            has_splits=num_splits > 1,
            activation=activation,
            **constants,
            **options,
            **lets_next_begin(self._gpu),
        )
        return out


def _constants(weight: CodedWeight) -> dict[str, object]:
    return {
        "form": weight.form,
        "meaning": weight.meaning,
        "group_size": weight.group_size,
        "scale_rows": weight.scale_rows,
        "fills_blocks": weight.num_inputs % 128 == 0,
    }


def _cases() -> Iterator[CompileCase]:
    """Each configuration as large models use it, fp8 also in the narrow groups of ranks' shares of blocks;
    other scales in one configuration of each form."""
    for form, meaning, group_size in (
        ("int4", "float16", 128),
        ("int8", "float32", 0),
        ("fp8", "float32", 0),
    ):
        for one in configurations(KERNELS[form]):
            yield _case(one, form, meaning, group_size)
            if form == "fp8":
                for narrow_group in (64, 32) if one.shape_class in (MANY_ROWS, DEFAULT) else (64,):
                    yield _case(one, form, meaning, narrow_group, scale_rows=128)
            if one.gpu == DEFAULT or one.shape_class != "rows_8":
                continue
            yield _case(one, form, meaning, group_size, activation="silu")
            if form == "int4":
                for other in (0, 32, 64):
                    yield _case(one, form, "bfloat16", other, number="fp16")
            elif form == "int8":
                yield _case(one, form, "float16", 32)
            else:
                yield _case(one, form, "float32", 128, scale_rows=128, number="fp16")


def _case(
    one: Configuration,
    form: str,
    meaning: str,
    group_size: int,
    *,
    scale_rows: int = 1,
    number: str = "bf16",
    activation: Activation | None = None,
) -> CompileCase:
    values = dict(one.values)
    has_splits = values.pop("programs") > 1
    constants, options = split_options(values)
    pointers = {
        "x": f"*{number}",
        "codes": "*i16",
        "meanings": "*fp32" if meaning == "float32" else "*i32",
    }
    sizes = ("num_rows", "num_blocks", "num_splits")
    label = f"{one.label} {form} {meaning} groups of {group_size} {number} {activation or ''}"
    own: dict[str, object] = {
        "form": form,
        "meaning": meaning,
        "group_size": group_size,
        "scale_rows": scale_rows,
        "fills_blocks": True,
        "has_splits": has_splits,
        "activation": activation,
        "bias": None,
        **constants,
    }
    signature = {
        **pointers,
        "out": f"*{number}",
        "partials": "*fp32",
        "arrivals": "*i32",
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(("num_outputs", "num_inputs", "x_stride"), "i32:16"),
    }
    return CompileCase(label, coded_product_kernel, signature, own, options, one.capabilities)


COMPILED = list(_cases())

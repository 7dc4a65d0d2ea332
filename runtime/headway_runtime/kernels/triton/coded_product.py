"""x @ weight.T where the weight is 4- or 8-bit codes and x is not: few rows, for which only bytes count.

Floor: inputs * outputs / 2 bytes (4 bits) or inputs * outputs (8 bits) over the bandwidth of memory. A merged
gate and up projection of an 8B Llama (28672 outputs of 4096 inputs) in 4 bits with a scale of 128 inputs is
58.7 MB, and 3.7 MB of scales and zero points: 14.5 us at 4.3 TB/s.

Why the products are those of tensor cores even for one row: an H200 issues 132 * 128 * 1.75 GHz = 30e12
instructions of one lane a second, and 4.3 TB/s are 8.6e12 weights of 4 bits: 3.4 instructions for each. To
shift, mask, subtract, widen to float32 and multiply-add takes 4.5; as pairs of bfloat16 for tensor cores it
is 1.5 for the codes (see widening.py) and 1/8 for the product. So the weight is the left operand, in
registers where its codes became numbers, and x the right one, whose columns are padded to 8: out.T = weight @
x.T. Expected: 80% of the floor for the larger projections, less for those that take 2 to 3 us (starting takes
1).

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

from headway_runtime.kernels.triton.coded_weight import CodedWeight
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    Configuration,
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
    own_blocks,
    splits_of,
    summed_splits,
)
from headway_runtime.kernels.triton.widening import (
    above_zeros,
    nibbles,
    scale_and_zero,
    two_bytes,
)

KERNELS = {"int4": "coded_product_int4", "int8": "coded_product_int8", "fp8": "coded_product_fp8"}
# What `benchmarks/gpu/tune.py` tries.
CANDIDATES = {
    "rows_1": [
        {
            "block_outputs": outputs,
            "block_rows": 8,
            "programs": programs,
            "num_warps": warps,
            "num_stages": stages,
        }
        for outputs, warps in ((16, 1), (32, 2), (64, 4), (128, 4))
        for programs in (2, 4, 6)
        for stages in (4, 6)
    ],
    "rows_16": [
        {
            "block_outputs": outputs,
            "block_rows": 16,
            "programs": programs,
            "num_warps": 4,
            "num_stages": stages,
        }
        for outputs in (64, 128)
        for programs in (2, 4)
        for stages in (4, 6)
    ],
    MANY_ROWS: [
        {"block_outputs": outputs, "block_rows": rows, "programs": 1, "num_warps": warps, "num_stages": 3}
        for outputs, rows, warps in ((64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 8))
    ],
}
CANDIDATES["rows_8"] = CANDIDATES["rows_1"]
CANDIDATES["rows_32"] = [{**one, "block_rows": 32} for one in CANDIDATES["rows_16"]]
CANDIDATES["rows_64"] = [{**one, "block_rows": 64} for one in CANDIDATES["rows_16"]]


@triton.jit  # type: ignore[untyped-decorator]
def coded_product_kernel(  # noqa: C901 (branches on constants)
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
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Grid: tiles of rows within tiles of outputs (those read the same codes), splits.

    x: [num_rows, num_inputs], rows `x_stride` apart. out: [num_rows, num_outputs]. The rest: `CodedWeight`.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    usual_zero: tl.constexpr = 8.0 if form == "int4" else 0.0
    # Words that are loaded at once for one product each of their codes, and how many loads a block takes.
    num_words: tl.constexpr = 64 if form == "fp8" else 32
    codes_per_word: tl.constexpr = 4 if form == "int4" else 2
    num_loads: tl.constexpr = 128 // num_words // codes_per_word
    tile = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, block_rows)
    outputs = tile // num_row_tiles * block_outputs + tl.arange(0, block_outputs)
    rows = tile % num_row_tiles * block_rows + tl.arange(0, block_rows)
    places = tl.arange(0, num_words)
    # Outputs past the end read the last one's codes, so that no load needs a mask.
    own = tl.minimum(outputs, num_outputs - 1)
    if form == "fp8":
        codes_at = codes + own.to(tl.int64)[:, None] * (num_inputs // 2) + places[None, :]
        block_stride = 64
    else:
        codes_at = codes + own[:, None] * (32 * num_loads) + places[None, :]
        block_stride = num_outputs.to(tl.int64) * (32 * num_loads)
    num_meanings = tl.cdiv(num_outputs, scale_rows)
    meanings_at = meanings + own // scale_rows
    x_at = x + rows.to(tl.int64)[None, :] * x_stride + places[:, None]
    is_row = (rows < num_rows)[None, :]
    first, end = own_blocks(num_blocks, tl.program_id(1), num_splits)
    total = tl.zeros([block_outputs, block_rows], tl.float32)
    # A scale reaches no operand of a product, so the compiler does not load it ahead; here that is done.
    group_blocks: tl.constexpr = group_size // 128 if group_size >= 128 else 1
    ahead = tl.load(meanings_at + (first // group_blocks if group_size >= 128 else 0) * num_meanings)
    scales, zeros = scale_and_zero(ahead, meaning, usual_zero)

    for block in range(first, end):
        if group_size >= 128:
            scales, zeros = scale_and_zero(ahead, meaning, usual_zero)
            ahead = tl.load(meanings_at + tl.minimum(block + 1, end - 1) // group_blocks * num_meanings)
            if meaning != "float32":
                words = tl.load(meanings_at + block // group_blocks * num_meanings)
                zeros = scale_and_zero(words, meaning, usual_zero)[1]
        part = total if group_size == 0 else tl.zeros_like(total)
        for load in tl.static_range(num_loads):
            if form == "fp8" and not fills_blocks:
                is_code = (block * 128 + 2 * places < num_inputs)[None, :]
                codes_of = tl.load(codes_at + block * block_stride, mask=is_code, other=0)
            else:
                codes_of = tl.load(codes_at + block * block_stride + load * 32)
            if form == "int4":
                # Zero points that differ from plane to plane are subtracted later.
                known = tl.zeros_like(zeros) if 0 < group_size < 128 else zeros
                planes = nibbles(codes_of, tl.broadcast_to(known[:, None], [block_outputs, 32]), dtype)
            else:
                planes = two_bytes(codes_of, form, dtype)
            if form == "fp8":
                # A word has neighbours, so one product is of even inputs and one of odd ones.
                inputs = tl.arange(0, 128)
                pairs = tl.load(
                    x + rows.to(tl.int64)[None, :] * x_stride + (block * 128 + inputs)[:, None],
                    mask=is_row if fills_blocks else is_row & (block * 128 + inputs < num_inputs)[:, None],
                    other=0.0,
                )
                halves = tl.split(tl.permute(tl.reshape(pairs, [64, 2, block_rows]), (0, 2, 1)))
            for plane in tl.static_range(codes_per_word):
                inputs = block * 128 + (load * codes_per_word + plane) * 32
                if form == "fp8":
                    numbers = halves[plane]
                else:
                    is_read = is_row if fills_blocks else is_row & (inputs + places < num_inputs)[:, None]
                    numbers = tl.load(x_at + inputs, mask=is_read, other=0.0)
                weight = planes[plane]
                if 0 < group_size < 128:
                    own_words = tl.load(meanings_at + inputs // group_size * num_meanings)
                    scales, zeros = scale_and_zero(own_words, meaning, usual_zero)
                    weight = above_zeros(weight, zeros)
                    total += dot(weight, numbers, tl.zeros_like(total)) * scales[:, None]
                else:
                    if form == "int8" and meaning != "float32":
                        weight = above_zeros(weight, zeros)
                    part = dot(weight, numbers, part)
        if group_size == 0:
            total = part
        elif group_size >= 128:
            total += part * scales[:, None]
    if group_size == 0:
        total *= scales[:, None]

    is_inside = (outputs < num_outputs)[:, None] & is_row
    if has_splits:
        split = tl.program_id(1)
        if arrives_last(
            total, partials, arrivals, tile, split, num_splits, is_inside, block_outputs, block_rows
        ):
            total = summed_splits(
                total, partials, arrivals, tile, num_splits, is_inside, block_outputs, block_rows
            )
            _store(total, bias, out, rows, outputs, num_outputs, is_inside)
    else:
        _store(total, bias, out, rows, outputs, num_outputs, is_inside)


@triton.jit
def _store(total, bias, out, rows, outputs, num_outputs, is_inside):
    if bias is not None:
        total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_at = out + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out_at, narrow(total, out.dtype.element_ty), mask=is_inside)


class CodedProduct:
    """Launches the kernel for one weight. Not for two streams at once: splits meet in its counters."""

    __slots__ = ("_arrivals", "_bias", "_constants", "_gpu", "num_inputs", "num_outputs", "weight")

    def __init__(self, weight: CodedWeight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        self.num_outputs, self.num_inputs = weight.num_outputs, weight.num_inputs
        device = weight.codes.device
        self._gpu = gpu_of(device)
        # As many as there are tiles where inputs are split.
        most = 4 * self._gpu.num_multiprocessors * 4
        self._arrivals = torch.zeros(most, dtype=torch.int32, device=device)
        self._constants = _constants(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs] of float16, bfloat16 or float32."""
        weight, num_rows = self.weight, len(x)
        out = x.new_empty((num_rows, self.num_outputs))
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
            **constants,
            **options,
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
    """Each configuration as large models use it; other scales in one configuration of each form."""
    for form, meaning, group_size in (
        ("int4", "float16", 128),
        ("int8", "float32", 0),
        ("fp8", "float32", 0),
    ):
        for one in configurations(KERNELS[form]):
            yield _case(one, form, meaning, group_size)
            if one.gpu == DEFAULT or one.shape_class != "rows_8":
                continue
            if form == "int4":
                for other in (0, 32, 64):
                    yield _case(one, form, "bfloat16", other, number="fp16")
            elif form == "int8":
                yield _case(one, form, "float16", 32)
            else:
                yield _case(one, form, "float32", 128, scale_rows=128, number="fp16")


def _case(
    one: Configuration, form: str, meaning: str, group_size: int, *, scale_rows: int = 1, number: str = "bf16"
) -> CompileCase:
    values = dict(one.values)
    has_splits = values.pop("programs") > 1
    constants, options = split_options(values)
    pointers = {
        "x": f"*{number}",
        "codes": "*u8" if form == "fp8" else "*i16",
        "meanings": "*fp32" if meaning == "float32" else "*i32",
    }
    sizes = ("num_rows", "num_blocks", "num_splits")
    label = f"{one.label} {form} {meaning} groups of {group_size} {number}"
    own: dict[str, object] = {
        "form": form,
        "meaning": meaning,
        "group_size": group_size,
        "scale_rows": scale_rows,
        "fills_blocks": True,
        "has_splits": has_splits,
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

"""x @ weight.T (+ bias) of plain numbers for few rows, where only the weight's bytes count.

Floor: 2 * inputs * outputs bytes over the bandwidth of memory; Llama-3.1-8B's projection back, 4096 x 4096,
is 33.6 MB: 7.9 us at 4.3 TB/s. Measured on an H200, one row: 11.6 us, and 15.4 for the merged projection of
queries, keys and values (floor 11.8) and 30.9 for the one down (27.5), in one launch each. cuBLAS takes 12.6,
16.2 and 31.4, in two launches where it splits inputs.

A program has a tile of outputs and a split of the inputs, in blocks of BLOCK_INPUTS: at most `programs` to a
multiprocessor, all at once, so that none waits for a second wave. Whoever of a tile's splits arrives last
adds them up (row_products.py). The rows are padded to 16, for which tensor cores have the time.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    Gpu,
    configuration,
    configurations,
    dot,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import let_next_begin, lets_next_begin
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.row_products import (
    arrives_last,
    filled,
    own_blocks,
    split_counters,
    splits_of,
    summed_splits,
)

KERNEL = "thin_product"
BLOCK_ROWS = 16
# What an entry of the tables says of when to launch. On other GPUs than the H200 it is not measured.
LIMITS = ("most_rows", "most_megabytes")


def _candidates() -> list[dict[str, int]]:
    return [
        {
            "BLOCK_OUTPUTS": outputs,
            "BLOCK_INPUTS": inputs,
            "programs": programs,
            "num_warps": warps,
            "num_stages": stages,
        }
        for outputs, warps in ((16, 4), (32, 4), (64, 4))
        for inputs in (64, 128, 256)
        for programs in (2, 3, 4, 6)
        for stages in (3, 4, 6)
        # Shared memory of all programs that are to run at once.
        if (BLOCK_ROWS + outputs) * inputs * 2 * stages * programs <= 224 * 1024
    ]


# What benchmarks/gpu/tune.py tries.
CANDIDATES = {DEFAULT: _candidates()}


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def thin_product_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    partials,
    arrivals,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    num_splits,
    HAS_BIAS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    FITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Programs: (tile of outputs, split). FITS: BLOCK_INPUTS divides the inputs."""
    let_next_begin(overlaps)
    rows = tl.arange(0, ROWS)
    tile = tl.program_id(0)
    outputs = tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = (rows < num_rows)[:, None], (outputs < num_outputs)[None, :]
    # Places of outputs that there are not are read as the last one's: no mask in the loop.
    own = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    first, end = own_blocks(tl.cdiv(num_inputs, BLOCK_INPUTS), tl.program_id(1), num_splits)
    x_tile = x_pointer + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    weight_tile = weight_pointer + own[None, :] * num_inputs + inputs[:, None]
    total = tl.zeros((ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(first * BLOCK_INPUTS, end * BLOCK_INPUTS, BLOCK_INPUTS):
        if FITS:
            x = tl.load(x_tile + start, mask=is_row, other=0.0)
            weight = tl.load(weight_tile + start)
        else:
            is_input = start + inputs < num_inputs
            x = tl.load(x_tile + start, mask=is_row & is_input[None, :], other=0.0)
            weight = tl.load(weight_tile + start, mask=is_input[:, None], other=0.0)
        total = dot(x, weight, total)

    is_inside = is_row & is_output
    is_last = True
    if HAS_SPLITS:
        split = tl.program_id(1)
        is_last = arrives_last(
            total, partials, arrivals, tile, split, num_splits, is_inside, ROWS, BLOCK_OUTPUTS
        )
    if is_last:
        sums = total
        if HAS_SPLITS:
            sums = summed_splits(total, partials, arrivals, tile, num_splits, is_inside, ROWS, BLOCK_OUTPUTS)
        if HAS_BIAS:
            sums += tl.load(bias_pointer + own).to(tl.float32)[None, :]
        target = out_pointer + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
        tl.store(target, narrow(sums, out_pointer.dtype.element_ty), mask=is_inside)


class ThinProduct:
    """Launches the kernel for one weight. Not for two streams at once: splits meet in its counters."""

    __slots__ = ("_arrivals", "_bias", "_gpu", "_weight", "most_rows")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: contiguous [outputs, inputs]."""
        assert weight.is_contiguous()
        self._weight, self._bias = weight, bias
        self._gpu = gpu_of(weight.device)
        self._arrivals = split_counters(self._gpu, weight.device)
        self.most_rows = most_thin_rows(self._gpu, weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs], up to `most_rows`. Returns [rows, outputs]."""
        num_rows, num_inputs = x.shape
        num_outputs = len(self._weight)
        assert num_rows <= BLOCK_ROWS
        out = x.new_empty((num_rows, num_outputs))
        if num_rows == 0:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        values = _launched(configuration(KERNEL, DEFAULT, self._gpu))
        programs = values.pop("programs")
        constants, options = split_options(values)
        block_inputs, block_outputs = constants["BLOCK_INPUTS"], constants["BLOCK_OUTPUTS"]
        num_tiles = triton.cdiv(num_outputs, block_outputs)
        num_blocks = triton.cdiv(num_inputs, block_inputs)
        num_splits = 1
        if num_tiles <= len(self._arrivals):
            num_splits = filled(splits_of(num_tiles, num_blocks, programs, self._gpu), num_blocks)
        partials = (
            x.new_empty(num_tiles * num_splits * BLOCK_ROWS * block_outputs, dtype=torch.float32)
            if num_splits > 1
            else None
        )
        thin_product_kernel[(num_tiles, num_splits)](
            x,
            self._weight,
            self._bias,
            out,
            partials,
            self._arrivals,
            num_rows,
            num_outputs,
            num_inputs,
            x.stride(0),
            num_splits,
            HAS_BIAS=self._bias is not None,
            HAS_SPLITS=num_splits > 1,
            FITS=num_inputs % block_inputs == 0,
            ROWS=BLOCK_ROWS,
            **constants,
            **options,
            **lets_next_begin(self._gpu),
        )
        return out


def most_thin_rows(gpu: Gpu, weight: Tensor) -> int:
    """Up to how many rows this is taken instead of cuBLAS: as many as it was measured to be faster for.

    0 for a weight so large that cuBLAS is at its floor, or whose tiles do not all run at once.
    """
    entry = configuration(KERNEL, DEFAULT, gpu)
    num_tiles = triton.cdiv(len(weight), entry["BLOCK_OUTPUTS"])
    is_large = weight.nbytes > entry["most_megabytes"] * 10**6
    is_more_than_a_wave = num_tiles > entry["programs"] * gpu.num_multiprocessors
    return 0 if is_large or is_more_than_a_wave else entry["most_rows"]


def _launched(values: Mapping[str, int]) -> dict[str, int]:
    """Of an entry, what a launch is told."""
    return {name: value for name, value in values.items() if name not in LIMITS}


def thin_product_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, in float32."""
    found = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return found.to(x.dtype)


def _cases() -> list[CompileCase]:
    cases = []
    for one in configurations(KERNEL):
        values = _launched(one.values)
        del values["programs"]
        constants, options = split_options(values)
        for fits, has_splits, has_bias in (
            (True, True, False),
            (False, True, False),
            (True, False, False),
            (True, True, True),
        ):
            bias: dict[str, object] = {} if has_bias else {"bias_pointer": None}
            cases.append(
                CompileCase(
                    f"{one.label} fits={fits} has_splits={has_splits} has_bias={has_bias}",
                    thin_product_kernel,
                    {
                        **dict.fromkeys(("x_pointer", "weight_pointer", "out_pointer"), "*bf16"),
                        **({"bias_pointer": "*bf16"} if has_bias else {}),
                        "partials": "*fp32",
                        "arrivals": "*i32",
                        "num_rows": "i32",
                        "num_splits": "i32",
                        **dict.fromkeys(("num_outputs", "num_inputs", "x_stride"), "i32:16"),
                    },
                    {
                        **bias,
                        "HAS_BIAS": has_bias,
                        "HAS_SPLITS": has_splits,
                        "FITS": fits,
                        "ROWS": BLOCK_ROWS,
                        **constants,
                    },
                    options,
                    one.capabilities,
                )
            )
    return cases


COMPILED = _cases()

"""The first half of a gated MLP for few rows in one kernel: activation(x @ gate.T) * (x @ up.T).

At decode the weights are all there is to read: 2 * size * inputs * 2 bytes of bfloat16 (235 MB for a layer of
Llama-3.1-8B, 49 us at an H200's 4.8 TB/s), against which rows and results are nothing. So the product is as
fast as the weights come, whatever multiplies, and that both halves of the merged weight are read by the same
program makes the activation free: of ten launches of a layer, one with its trip through memory less.

A program has a few outputs: their rows of both halves, tile by tile over all inputs, each tile of
BLOCK_INPUTS numbers (256 bytes of a row in one piece). `num_stages` tiles are on their way at once, copied to
shared memory behind the products: 2 * 32 rows * 256 bytes * 3 = 48 KB and more per program, 2 programs on a
multiprocessor, where 4.8 TB/s * 0.7 us / 132 = 25 KB would do. Rows beyond the real ones are zeros: the
tensor cores have time for 16 in any case.

Measured on an H200, Llama-3.1-8B: 56 us up to 16 rows (98% of copy bandwidth; tiles of so few outputs that
all its 896 programs run at once), 59 of 32 (95%), 63 of 64 (88%). Above that, where arithmetic begins to
count, cuBLAS and the gate by itself are as fast, and are what runs.
"""

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.gate import activated, gate_by_torch
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    configuration,
    configurations,
    dot,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import let_next_begin, lets_next_begin
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.model_config import Activation

MOST_ROWS = 64
# Of a thread, of 64 rows on 8.0: float32 is for comparing.
FLOAT32_SPILL_BYTES = 16


@triton.jit(do_not_specialize=["num_rows"])
def gated_product_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    num_rows,
    size,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    FITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Programs: (tile of outputs, tile of rows). FITS: BLOCK_INPUTS divides the inputs."""
    let_next_begin(overlaps)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = (rows < num_rows)[:, None], (outputs < size)[None, :]
    # Places of outputs that there are not are read as the last one's: no mask in the loop.
    own = tl.minimum(outputs, size - 1).to(tl.int64)
    x_tile = x_pointer + rows[:, None] * num_inputs + inputs[None, :]
    gate_tile = weight_pointer + own[None, :] * num_inputs + inputs[:, None]
    up_tile = gate_tile + size.to(tl.int64) * num_inputs
    gate = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(0, num_inputs, BLOCK_INPUTS):
        if FITS:
            x = tl.load(x_tile + start, mask=is_row, other=0.0)
            gate_weight, up_weight = tl.load(gate_tile + start), tl.load(up_tile + start)
        else:
            is_input = start + inputs < num_inputs
            x = tl.load(x_tile + start, mask=is_row & is_input[None, :], other=0.0)
            gate_weight = tl.load(gate_tile + start, mask=is_input[:, None], other=0.0)
            up_weight = tl.load(up_tile + start, mask=is_input[:, None], other=0.0)
        gate = dot(x, gate_weight, gate)
        up = dot(x, up_weight, up)
    if HAS_BIAS:
        gate += tl.load(bias_pointer + own).to(tl.float32)[None, :]
        up += tl.load(bias_pointer + size + own).to(tl.float32)[None, :]
    product = narrow(activated(gate, ACTIVATION) * up, out_pointer.dtype.element_ty)
    target = out_pointer + rows[:, None].to(tl.int64) * size + outputs[None, :]
    tl.store(target, product, mask=is_row & is_output)


class GatedProduct:
    """The launcher for one activation."""

    __slots__ = ("_activation", "most_rows")

    def __init__(self, activation: Activation) -> None:
        self._activation = activation
        self.most_rows = MOST_ROWS

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: contiguous [rows, inputs], up to MOST_ROWS. weight: [2 * size, inputs]. Returns [rows, size]."""
        num_rows, num_inputs = x.shape
        size = len(weight) // 2
        assert x.is_contiguous()
        assert weight.is_contiguous()
        assert num_rows <= MOST_ROWS
        out = x.new_empty((num_rows, size))
        if num_rows == 0:
            return out
        gpu = gpu_of(x.device)
        values = configuration("gated_product", str(max(16, triton.next_power_of_2(num_rows))), gpu)
        values["BLOCK_INPUTS"] = block_inputs(values["BLOCK_INPUTS"], x.element_size())
        grid = (triton.cdiv(size, values["BLOCK_OUTPUTS"]), triton.cdiv(num_rows, values["BLOCK_ROWS"]))
        gated_product_kernel[grid](
            x,
            weight,
            bias,
            out,
            num_rows,
            size,
            num_inputs,
            HAS_BIAS=bias is not None,
            FITS=num_inputs % values["BLOCK_INPUTS"] == 0,
            ACTIVATION=self._activation,
            **values,
            **lets_next_begin(gpu),
        )
        return out


def block_inputs(tabled: int, item_bytes: int) -> int:
    """The tables are for 16 bits; of float32, which is for comparing, as many bytes are on their way."""
    return max(16, tabled * 2 // item_bytes)


def gated_product_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """The reference, in float32."""
    both = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    found = gate_by_torch(both, activation)
    assert isinstance(found, torch.Tensor)
    return found.to(x.dtype)


def _cases() -> list[CompileCase]:
    cases = []
    for one in configurations("gated_product"):
        constants, options = split_options(one.values)
        for number, fits in (("bf16", True), ("bf16", False), ("fp32", True)):
            signature = {
                **dict.fromkeys(("x_pointer", "weight_pointer", "out_pointer"), f"*{number}"),
                "num_rows": "i32",
                "size": "i32:16",
                "num_inputs": "i32:16",
            }
            flags: dict[str, object] = {"HAS_BIAS": not fits, "FITS": fits, "ACTIVATION": "silu"}
            if fits:
                flags["bias_pointer"] = None
            else:
                signature["bias_pointer"] = f"*{number}"
            label = f"{one.label} {number}{'' if fits else ' masked, with bias'}"
            item_bytes = 4 if number == "fp32" else 2
            own = {**constants, "BLOCK_INPUTS": block_inputs(constants["BLOCK_INPUTS"], item_bytes)}
            cases.append(
                CompileCase(
                    label,
                    gated_product_kernel,
                    signature,
                    {**flags, **own},
                    options,
                    one.capabilities,
                    FLOAT32_SPILL_BYTES if number == "fp32" else 0,
                )
            )
    return cases


COMPILED = _cases()

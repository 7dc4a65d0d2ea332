"""The gated middle of an MLP: activation(gate) * up (arXiv 2002.05202), in one pass, as numbers or as codes.

Bytes, of one row of n bfloat16: 4n read, 2n written (n and a scale as codes, where a kernel of its own would
read 2n again). Plain rows are cut into pieces of 2 KB and more, so that even a row alone is spread over all
multiprocessors; each thread has two loads of 16 bytes in flight, and 2,048 threads of a multiprocessor 64 KB.
Rows that become codes have one program each, because of their one scale: their numbers stay in registers
between the search for the largest and the rounding.

Expected on an H200: 90% of copy bandwidth from 256 rows of 14336 on; at decode the time of a launch, which
`gated_product.py` saves for few rows. One rounding, from float32.
"""

import math

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.codes import (
    EXACT,
    KEPT_CAPABILITIES,
    STORED_TYPES,
    as_bytes,
    codes_of,
    kept_as,
    magnitude_bits,
    row_codes_by_torch,
    row_scale,
)
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.row_codes import RowCodes
from headway_runtime.model_config import Activation

# More numbers in a row than a program that makes codes holds in registers.
MOST_NUMBERS = 32768

_TWICE: tl.constexpr = tl.constexpr(2 * math.sqrt(2 / math.pi))
_HALF_ROOT: tl.constexpr = tl.constexpr(math.sqrt(0.5))


@triton.jit
def sigmoid(x):
    """Bounded where e**-x would be infinite, of which the interpreter warns: 1e-38 instead of 0."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 88.0)))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x: float32. GELU's form with tanh is a sigmoid too: (1 + tanh(u)) / 2 = 1 / (1 + e**-2u)."""
    if ACTIVATION == "silu":
        return x * sigmoid(x)
    if ACTIVATION == "gelu_tanh":
        return x * sigmoid((x + 0.044715 * x * x * x) * _TWICE)
    return 0.5 * x * (1.0 + tl.erf(x * _HALF_ROOT))


@triton.jit
def gate_kernel(
    gate_up_pointer,
    out_pointer,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """One program per piece of a row."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < SIZE
    row = tl.program_id(0).to(tl.int64)
    source = gate_up_pointer + row * (2 * SIZE) + columns
    gate = tl.load(source, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=is_real, other=0.0).to(tl.float32)
    product = narrow(activated(gate, ACTIVATION) * up, out_pointer.dtype.element_ty)
    tl.store(out_pointer + row * SIZE + columns, product, mask=is_real)


@triton.jit
def gate_codes_kernel(
    gate_up_pointer,
    out_pointer,
    scale_pointer,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One program per row."""
    columns = tl.arange(0, BLOCK)
    is_real = columns < SIZE
    row = tl.program_id(0).to(tl.int64)
    source = gate_up_pointer + row * (2 * SIZE) + columns
    gate = tl.load(source, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=is_real, other=0.0).to(tl.float32)
    # As if it had been written, and read by a kernel that makes codes.
    product = narrow(activated(gate, ACTIVATION) * up, gate_up_pointer.dtype.element_ty).to(tl.float32)
    scale = row_scale(tl.max(magnitude_bits(product), 0), KEPT)
    codes = codes_of(tl.div_rn(product, scale + tl.zeros_like(product)), KEPT)
    tl.store(out_pointer + row * SIZE + columns, codes, mask=is_real)
    tl.store(scale_pointer + row, scale)


class ActivateAndMultiply:
    """The launcher for one activation and size of the middle."""

    __slots__ = ("_activation", "_size")

    def __init__(self, activation: Activation, size: int) -> None:
        self._activation = activation
        self._size = size

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: contiguous [rows, 2 * size]. Returns [rows, size]."""
        out = self._checked(gate_up).new_empty((len(gate_up), self._size))
        if len(out) == 0:
            return out
        values = configuration("gate", DEFAULT, gpu_of(out.device))
        grid = (len(out), triton.cdiv(self._size, values["BLOCK"]))
        gate_kernel[grid](gate_up, out, SIZE=self._size, ACTIVATION=self._activation, **values)
        return out

    def codes(self, gate_up: Tensor, dtype: torch.dtype) -> RowCodes:
        """The same as codes of that type."""
        assert self._size <= MOST_NUMBERS
        out = self._checked(gate_up).new_empty((len(gate_up), self._size), dtype=dtype)
        scales = torch.empty(len(out), dtype=torch.float32, device=out.device)
        if len(out):
            gpu, block = gpu_of(out.device), triton.next_power_of_2(self._size)
            gate_codes_kernel[(len(out),)](
                gate_up,
                as_bytes(out),
                scales,
                SIZE=self._size,
                BLOCK=block,
                ACTIVATION=self._activation,
                KEPT=kept_as(dtype, gpu),
                **configuration("gate_codes", str(block), gpu),
                **EXACT,
            )
        return RowCodes(out, scales, gate_up.dtype)

    def _checked(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        assert gate_up.shape[1] == 2 * self._size
        return gate_up


def gate_by_torch(
    gate_up: Tensor, activation: Activation, dtype: torch.dtype | None = None
) -> Tensor | RowCodes:
    """The reference. dtype: of codes, if any."""
    gate, up = gate_up.float().chunk(2, -1)
    match activation:
        case "silu":
            middle = functional.silu(gate)
        case "gelu":
            middle = functional.gelu(gate)
        case "gelu_tanh":
            middle = functional.gelu(gate, approximate="tanh")
    product = (middle * up).to(gate_up.dtype)
    return product if dtype is None else row_codes_by_torch(product, dtype)


def _cases() -> list[CompileCase]:
    cases = []
    for one in configurations("gate"):
        constants, options = split_options(one.values)
        signature = {"gate_up_pointer": "*bf16", "out_pointer": "*bf16"}
        for activation in ("silu", "gelu_tanh", "gelu"):
            own = {"SIZE": 14336, "ACTIVATION": activation, **constants}
            cases.append(
                CompileCase(
                    f"{one.label} {activation}", gate_kernel, signature, own, options, one.capabilities
                )
            )
    for one in configurations("gate_codes"):
        block = 16384 if one.shape_class == DEFAULT else int(one.shape_class)
        _, options = split_options(one.values)
        for kept, capabilities in KEPT_CAPABILITIES.items():
            if (stored := STORED_TYPES[kept]) is None:
                continue
            cases.append(
                CompileCase(
                    f"{one.label} {kept}",
                    gate_codes_kernel,
                    {"gate_up_pointer": "*bf16", "out_pointer": stored, "scale_pointer": "*fp32"},
                    {"SIZE": block * 7 // 8, "BLOCK": block, "ACTIVATION": "silu", "KEPT": kept},
                    {**options, **EXACT},
                    tuple(each for each in one.capabilities if each in capabilities),
                )
            )
    return cases


COMPILED = _cases()

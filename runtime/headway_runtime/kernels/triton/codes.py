"""Numbers as codes of one byte and a float32 scale, as kernels make them: of rows, and of heads in the cache.

The largest magnitude gets the largest code. Heads are rounded exactly as `layers/kv_numbers.py` does, rows
as quantized checkpoints ask for. GPUs
before capability 8.9 convert no 8-bit floats, nor does the interpreter in a way to rely on; there the bits
are made of integers. Kernels that use this are compiled without contraction of products and sums (`EXACT`):
it would round once where the reference rounds twice.

Knows nothing of where numbers come from or go to.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import INTERPRETED, Gpu
from headway_runtime.kernels.triton.row_codes import RowCodes

EXACT = {"enable_fp_fusion": False}
# First GPUs that convert 8-bit floats.
FLOAT8_CAPABILITY = 89

LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# How numbers are kept: as they are, or as codes. Kernels are told by such a constant.
Kept = Literal["plain", "int8", "float8", "float8 bits"]
# Which GPUs keep numbers so, and what the compiler is told of where they are stored (None: as computed).
KEPT_CAPABILITIES: dict[Kept, tuple[int, ...]] = {
    "plain": (80, 90),
    "int8": (80, 90),
    "float8": (90,),
    "float8 bits": (80,),
}
STORED_TYPES: dict[Kept, str | None] = {"plain": None, "int8": "*i8", "float8": "*u8", "float8 bits": "*u8"}

# What is divided by instead of zero: of heads, as in `layers/kv_numbers.py`, and of rows.
LEAST_MAGNITUDE = 1e-30
LEAST_SCALE = 1e-12

_LEAST_SCALE: tl.constexpr = tl.constexpr(LEAST_SCALE)
_LEAST_MAGNITUDE: tl.constexpr = tl.constexpr(LEAST_MAGNITUDE)


def kept_as(dtype: torch.dtype | None, gpu: Gpu) -> Kept:
    """dtype: of the codes; any other one: plain."""
    if dtype == torch.int8:
        return "int8"
    if dtype == torch.float8_e4m3fn:
        return "float8" if gpu.capability >= FLOAT8_CAPABILITY and not INTERPRETED else "float8 bits"
    return "plain"


def as_bytes(tensor: Tensor) -> Tensor:
    """Not every operator, nor every version of Triton, knows 8-bit floats; to be stored they are bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, float32, as integers that are ordered alike; what is no number is above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def inverse_and_scale(largest_bits, KEPT: tl.constexpr):
    """What numbers are multiplied by to be codes, and codes to be numbers."""
    largest_code: tl.constexpr = 127.0 if KEPT == "int8" else 448.0
    largest = largest_bits.to(tl.float32, bitcast=True)
    divisor = tl.where(largest < _LEAST_MAGNITUDE, _LEAST_MAGNITUDE, largest)
    return tl.div_rn(tl.full(divisor.shape, largest_code, tl.float32), divisor), largest * (
        1.0 / largest_code
    )


@triton.jit
def row_scale(largest_bits, KEPT: tl.constexpr):
    """What the numbers of a row are divided by to be codes."""
    largest_code: tl.constexpr = 127.0 if KEPT == "int8" else 448.0
    largest = largest_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, largest_code, tl.float32))
    return tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)


@triton.jit
def codes_of(x, KEPT: tl.constexpr):
    """x: float32, multiplied or divided already. int8, or the bytes of 8-bit floats."""
    if KEPT == "int8":
        # Adding and taking off 1.5 * 2**23 leaves no bits below 1: rounded, halves to even numbers.
        rounded = (x + 12582912.0) - 12582912.0
        code = tl.where(x != x, 0.0, rounded).to(tl.int8)
    elif KEPT == "float8":
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # 3 of 23 bits stay; halves to even. Exponents are counted from 2**-7 instead of 2**-127.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 codes are 2**-9 apart, as are float32 at 2**14.
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        found = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
        found = tl.where(magnitude > 0x7F800000, 0x7F, found)
        code = (found | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


def row_codes_by_torch(x: Tensor, dtype: torch.dtype) -> RowCodes:
    """The reference of rows [rows, size]."""
    wide, largest_code = x.float(), LARGEST_CODES[dtype]
    scales = (wide.abs().amax(-1) / largest_code).clamp_(min=LEAST_SCALE)
    codes = wide / scales.unsqueeze(-1)
    if dtype == torch.int8:
        codes.round_()
    return RowCodes(codes.clamp_(-largest_code, largest_code).to(dtype), scales, x.dtype)


def head_codes_by_torch(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference of heads, [..., head_dim], and their scales, float32 [...]: as the cache keeps them."""
    wide, largest_code = x.float(), LARGEST_CODES[dtype]
    largest = wide.abs().amax(-1)
    inverse = torch.full_like(largest, largest_code) / largest.clamp_min(LEAST_MAGNITUDE)
    codes = wide * inverse.unsqueeze(-1)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), largest * (1.0 / largest_code)

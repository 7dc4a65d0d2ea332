"""The rule for rounding to fewer bits, the same on a GPU and in Triton's interpreter.

GPUs round to the nearest number, halves to the even one. The interpreter (triton 3.9) cuts float32 off to
bfloat16, unless asked for a rounding, and that has halves wrong: errors of a whole unit, all towards zero.
Every kernel narrows numbers by this function, and stores none that it has not narrowed itself.
"""

import triton
import triton.language as tl

from headway_runtime.kernels.triton.launch import INTERPRETED

_CUTS: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 `x` in a floating type, rounded to nearest even."""
    if _CUTS and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        narrowed = tl.where(x != x, x, rounded.to(tl.float32, bitcast=True)).to(DTYPE)
    else:
        narrowed = x.to(DTYPE)
    return narrowed

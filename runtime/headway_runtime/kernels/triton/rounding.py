"""The rule for rounding to fewer bits, the same on a GPU and in Triton's interpreter.

GPUs round to the nearest number, halves to the even one. The interpreter (triton 3.6 to 3.9) cuts float32 off to
bfloat16, whatever rounding it is asked for: errors of a whole unit, all towards zero. Every kernel narrows
numbers by this function, and stores none that it has not narrowed itself.
"""

import triton
import triton.language as tl

from headway_runtime.kernels.triton.launch import INTERPRETED

_CUTS: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit  # type: ignore[untyped-decorator]
def narrow(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """float32 `x` in a floating type, rounded to nearest even."""
    if _CUTS and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        narrowed = tl.where(x != x, x, rounded.to(tl.float32, bitcast=True)).to(DTYPE)
    else:
        narrowed = x.to(DTYPE)
    return narrowed

"""How close results in a type come to float32 references."""

import torch
from torch import Tensor

# Of the largest number: what rounding to the type may cost, twice.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def close(got: Tensor, want: Tensor) -> bool:
    limit = TOLERANCE[got.dtype] * max(1.0, float(want.abs().max()))
    return bool(((got.float() - want).abs() <= limit).all())

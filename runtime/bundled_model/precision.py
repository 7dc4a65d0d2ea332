"""Which numbers a network is trained in on this processor."""

from __future__ import annotations

import torch


def training_dtype() -> torch.dtype:
    """bfloat16 where oneDNN has products of it, which is from AVX-512 and on Arm with bf16; else float32.

    Elsewhere PyTorch multiplies bfloat16 number by number: a step of training took over twenty times as long.
    """
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def mixed_precision() -> torch.autocast:
    """Products in `training_dtype`, the rest where it is safe."""
    dtype = training_dtype()
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)

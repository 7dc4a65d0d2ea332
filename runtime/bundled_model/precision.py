"""Which numbers a network is trained in on this processor."""

from __future__ import annotations

import torch


def training_dtype() -> torch.dtype:
    """bfloat16 where oneDNN has products of it, which is from AVX-512 and on Arm with bf16; else float32.

    Elsewhere PyTorch has no fast products of it: 28 small steps of the target had not ended after 300 s on
    two cores without AVX-512, and took 45 s in float32.
    """
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def mixed_precision() -> torch.autocast:
    """Products in `training_dtype`, the rest where it is safe."""
    dtype = training_dtype()
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)

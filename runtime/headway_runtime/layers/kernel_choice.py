"""Whose kernels layers get on a device: Triton's on a GPU and our CPU kernels on a CPU, unless told otherwise.

HEADWAY_KERNELS says otherwise, for all devices: "torch" leaves everything to PyTorch's operators, "triton"
asks for Triton's also on a CPU, where they are interpreted, which is slow and for tests. It is read once.
"""

import os
from functools import cache
from typing import Literal, cast, get_args

import torch

from headway_runtime.errors import ConfigError

VARIABLE = "HEADWAY_KERNELS"
Choice = Literal["auto", "torch", "triton"]


@cache
def _choice() -> Choice:
    told = os.environ.get(VARIABLE) or "auto"
    if told not in get_args(Choice):
        raise ConfigError(f"{VARIABLE}={told!r} is not known; use one of {', '.join(get_args(Choice))}")
    return cast("Choice", told)


def uses_triton(device: torch.device) -> bool:
    """ConfigError if they are asked for on a CPU and Triton does not interpret."""
    if device.type == "cuda":
        return _choice() != "torch"
    if device.type != "cpu" or _choice() != "triton":
        return False
    from headway_runtime.kernels.triton.launch import INTERPRETED

    if not INTERPRETED:
        raise ConfigError(
            f"{VARIABLE}='triton' on a CPU needs Triton's interpreter; set TRITON_INTERPRET=1 as well"
        )
    return True


def uses_cpu_kernels(device: torch.device) -> bool:
    """Layers for which there are Triton kernels ask for those first."""
    return device.type == "cpu" and _choice() != "torch"

"""Whose kernels layers get: Triton's on NVIDIA's GPUs and our CPU kernels on a CPU, unless told otherwise.

HEADWAY_KERNELS says otherwise, for all devices: "torch" leaves everything to PyTorch's operators, "triton"
asks for Triton's also on a CPU, where they are interpreted, which is slow and for tests. It is read once.
"""

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import Literal, cast, get_args

import torch

from headway_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
VARIABLE = "HEADWAY_KERNELS"
Choice = Literal["auto", "torch", "triton"]


@cache
def _choice() -> Choice:
    told = os.environ.get(VARIABLE) or "auto"
    if told not in get_args(Choice):
        raise ConfigError(f"{VARIABLE}={told!r} is not known; use one of {', '.join(get_args(Choice))}")
    return cast("Choice", told)


def forget_choice() -> None:
    """Have it read again: for tests that compare."""
    _choice.cache_clear()


def uses_triton(device: torch.device) -> bool:
    """ConfigError if they are asked for on a CPU and Triton does not interpret, or on a GPU of AMD's."""
    if device.type == "meta":
        return True  # stands for a GPU that has them, while they are compiled for it
    if device.type == "cuda":
        if _choice() == "triton" and torch.version.hip is not None:
            raise ConfigError(
                f"{VARIABLE}='triton': Triton's kernels here are written for CUDA, and this PyTorch is built "
                f"for ROCm; leave it out, and PyTorch's operators are used"
            )
        return _choice() != "torch" and _runs_triton(device)
    if device.type != "cpu" or _choice() != "triton":
        return False
    from headway_runtime.kernels.triton.launch import INTERPRETED

    if not INTERPRETED:
        raise ConfigError(
            f"{VARIABLE}='triton' on a CPU needs Triton's interpreter; set TRITON_INTERPRET=1 as well"
        )
    return True


@cache
def _runs_triton(device: torch.device) -> bool:
    """Whether a GPU is NVIDIA's and new enough, and Triton is there."""
    if torch.version.hip is not None:
        # Whatever capability it tells: kernels have PTX in them, and launches that only CUDA knows.
        logger.warning("no Triton kernels: they are for CUDA, this PyTorch is built for ROCm; steps are slow")
        return False
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        logger.info("no Triton kernels: they need compute capability 8.0, this GPU has %d.%d", *found)
        return False
    if find_spec("triton") is None:
        logger.info("no Triton kernels: triton is not installed")
        return False
    return True


def uses_cpu_kernels(device: torch.device) -> bool:
    """Layers for which there are Triton kernels ask for those first."""
    return device.type == "cpu" and _choice() != "torch"

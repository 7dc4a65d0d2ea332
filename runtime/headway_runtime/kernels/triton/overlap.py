"""Launches that begin before the one in front of them has ended: CUDA's programmatic dependent launch.

On capability 9.0 a kernel may be put on the multiprocessors as soon as all programs of the one before it have
begun. Its start then costs nothing: the launch, the fetching of its code, what it finds out from lengths. It
must not touch what kernels before it write until they have ended; that is what `wait_for_last` is for, and
every kernel that is launched so waits in every program: so whoever has ended has seen the end of all before
it, and one wait is enough for all of them.

What attention reads before it waits are lengths and where rows begin, which the host's copies bring before a
step's first kernel. Between them and any attention lie launches that are not early (the gathering of rows of
the embedding, products), which begin when all before them has ended; and no kernel right before attention
writes them. Whatever else is read before a wait must be such.

Products of weights are not launched early, though they let the next kernel begin. Launched early, their
programs go to whatever multiprocessors have room, several to one and none to another, and wait there; and a
product is as fast as the multiprocessor that has most of it. Measured on an H200, Llama-3.1-8B of int4
weights, one sequence: 2.45 ms a step without early launches, 2.34 as it is, 3.10 with those of products and
with the first of their weights prefetched. Behind exchanges of several GPUs it has not run.

See CUDA's programming guide, "Programmatic Dependent Launch and Synchronization".
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway_runtime.errors import ConfigError
from headway_runtime.kernels.triton.launch import INTERPRETED, Gpu

LEAST_CAPABILITY = 90
VARIABLE = "HEADWAY_OVERLAP_LAUNCHES"


def _told() -> bool:
    """Whether launches may be early. ConfigError for anything but 0 and 1."""
    told = os.environ.get(VARIABLE) or "1"
    if told not in ("0", "1"):
        raise ConfigError(f"{VARIABLE}={told!r} is not known; use 0 or 1")
    return told == "1"


ENABLED = _told()


def launched_early(gpu: Gpu) -> dict[str, bool]:
    """Arguments of a launch: the kernel waits by itself, and lets the next one begin."""
    own = lets_next_begin(gpu)
    return {**own, "launch_pdl": True} if own["overlaps"] else own


def lets_next_begin(gpu: Gpu) -> dict[str, bool]:
    """Arguments of a launch that is not early itself."""
    return {"overlaps": gpu.capability >= LEAST_CAPABILITY and ENABLED and not INTERPRETED}


@triton.jit
def let_next_begin(overlaps: tl.constexpr):
    """First of all: the next kernel may be launched once all programs have come here."""
    if overlaps:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(overlaps: tl.constexpr):
    """Until all that earlier kernels have written is there. Before, nothing may be read but weights, and what
    a step is told."""
    if overlaps:
        gdc_wait()

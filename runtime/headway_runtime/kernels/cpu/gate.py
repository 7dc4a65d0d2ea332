"""The gated middle of an MLP: activation(gate) * up (arXiv 2002.05202), in one pass.

SiLU is x / (1 + e**-x). GELU in its form with tanh is the same with another exponent: since
(1 + tanh(u)) / 2 = 1 / (1 + e**-2u), it is x / (1 + e**-2u), u = sqrt(2 / pi) * (x + 0.044715 * x**3).
"""

import math
from functools import cache
from typing import Literal

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import Elements
from headway_runtime.kernels.cpu.emitter import Emitter

# Below so many numbers, threads cost more than they save.
LEAST_NUMBERS = 1 << 13

# The exponent of GELU's form with tanh is -(TWICE + CUBED * x**2) * x.
TWICE = 2 * math.sqrt(2 / math.pi)
CUBED = TWICE * 0.044715

KernelActivation = Literal["silu", "gelu_tanh"]


class ActivateAndMultiply:
    """The kernel for one activation and size of the middle."""

    __slots__ = ("_kernel", "_size")

    def __init__(self, activation: KernelActivation, size: int, dtype: torch.dtype, width: int) -> None:
        self._size = size
        name = f"{activation}_and_multiply"
        self._kernel = Kernel(name, _text(name, activation, size, elements(dtype), width))

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: contiguous [rows, 2 * size]. Returns [rows, size]."""
        assert gate_up.is_contiguous()
        assert gate_up.shape[1] == 2 * self._size
        out = gate_up.new_empty((len(gate_up), self._size))
        num_threads = 1 if out.numel() < LEAST_NUMBERS else torch.get_num_threads()
        self._kernel.run(num_threads, len(out), gate_up.data_ptr(), out.data_ptr())
        return out


@cache
def _text(name: str, activation: KernelActivation, size: int, stored: Elements, width: int) -> str:
    """A task is one row."""
    emitter = Emitter(name, width)
    rows, gate_up, out = (emitter.argument(index) for index in range(1, 4))
    row_bytes = size * stored.num_bytes
    with emitter.tasks(emitter.argument_address(0), rows) as row:
        gates = emitter.offset(gate_up, (row, 2 * row_bytes))
        ups, target = (
            emitter.offset(gates, (emitter.integer(row_bytes), 1)),
            emitter.offset(out, (row, row_bytes)),
        )
        with emitter.loop(size, step=width) as at:
            gate, up = emitter.load(gates, at, stored), emitter.load(ups, at, stored)
            # Far below zero, where e**-gate leaves float32, the quotient is as good as zero.
            exponent = emitter.smaller(emitter.splat(80.0), _exponent(emitter, activation, gate))
            activated = emitter.divide(gate, emitter.add(emitter.splat(1.0), emitter.exp(exponent)))
            emitter.store(emitter.multiply(activated, up), target, at, stored)
    return emitter.finish()


def _exponent(emitter: Emitter, activation: KernelActivation, gate: ir.Value) -> ir.Value:
    if activation == "silu":
        return emitter.negative(gate)
    square = emitter.multiply(gate, gate)
    slope = emitter.multiply_add(square, emitter.splat(-CUBED), emitter.splat(-TWICE))
    return emitter.multiply(slope, gate)

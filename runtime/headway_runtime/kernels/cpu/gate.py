"""The SiLU-gated middle of an MLP: silu(gate) * up (arXiv 2002.05202, SwiGLU), in one pass."""

from functools import cache

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.emitter import Elements, Emitter

# Below so many numbers, threads cost more than they save.
LEAST_NUMBERS = 1 << 13


class SiluAndMultiply:
    """The kernel for one size of the middle."""

    __slots__ = ("_kernel", "_size")

    def __init__(self, size: int, dtype: torch.dtype, width: int) -> None:
        self._size = size
        self._kernel = Kernel("silu_and_multiply", _text("silu_and_multiply", size, elements(dtype), width))

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: contiguous [rows, 2 * size]. Returns [rows, size]."""
        assert gate_up.is_contiguous()
        assert gate_up.shape[1] == 2 * self._size
        out = gate_up.new_empty((len(gate_up), self._size))
        num_threads = 1 if out.numel() < LEAST_NUMBERS else torch.get_num_threads()
        self._kernel.run(num_threads, len(out), gate_up.data_ptr(), out.data_ptr())
        return out


@cache
def _text(name: str, size: int, stored: Elements, width: int) -> str:
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
            power = emitter.exp(emitter.smaller(emitter.splat(80.0), emitter.negative(gate)))
            silu = emitter.divide(gate, emitter.add(emitter.splat(1.0), power))
            emitter.store(emitter.multiply(silu, up), target, at, stored)
    return emitter.finish()

"""Root mean square normalisation (arXiv 1910.07467), and the residual sum before it, in one pass."""

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.emitter import FLOAT32, Elements, Emitter

# Below so many numbers, threads cost more than they save.
LEAST_NUMBERS = 1 << 14


class RMSNormKernel:
    """The kernels for one width and epsilon: with a residual sum, and without."""

    __slots__ = ("_add_and_norm", "_norm", "_size")

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype, width: int) -> None:
        self._size = size
        stored = elements(dtype)
        self._norm = Kernel("norm", _text("norm", size, epsilon, stored, width, adds=False))
        self._add_and_norm = Kernel(
            "add_and_norm", _text("add_and_norm", size, epsilon, stored, width, adds=True)
        )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: contiguous [rows, size]."""
        assert x.is_contiguous()
        assert x.shape[1] == self._size
        out = torch.empty_like(x)
        self._norm.run(self._threads(x), len(x), x.data_ptr(), weight.data_ptr(), out.data_ptr())
        return out

    def add_and_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Adds `delta` to `x`, in place, and norms the sum; both contiguous [rows, size]."""
        assert x.is_contiguous()
        assert delta.is_contiguous()
        assert x.shape == delta.shape
        assert x.shape[1] == self._size
        out = torch.empty_like(x)
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), delta.data_ptr())
        self._add_and_norm.run(self._threads(x), len(x), *pointers)
        return out

    def _threads(self, x: Tensor) -> int:
        return 1 if x.numel() < LEAST_NUMBERS else torch.get_num_threads()


@cache
def _text(name: str, size: int, epsilon: float, stored: Elements, width: int, *, adds: bool) -> str:
    """A task is one row."""
    emitter = Emitter(name, width)
    rows, x, weight, out, *more = (emitter.argument(index) for index in range(1, 6 if adds else 5))
    row_bytes = size * stored.num_bytes
    row = emitter.local(size)
    with emitter.tasks(emitter.argument_address(0), rows) as index:
        source, target = (emitter.offset(place, (index, row_bytes)) for place in (x, out))
        squares = emitter.variable(emitter.splat(0.0))
        with emitter.loop(size, step=width) as at:
            number = emitter.load(source, at, stored)
            if adds:
                delta = emitter.load(emitter.offset(more[0], (index, row_bytes)), at, stored)
                number = emitter.rounded(emitter.add(number, delta), stored)
                emitter.store(number, source, at, stored)
            emitter.store(number, row, at, FLOAT32)
            squares.set(emitter.multiply_add(number, number, squares.get()))
        mean = emitter.multiply(emitter.sum_of_lanes(squares.get()), emitter.splat(1.0 / size))
        root = emitter.square_root(emitter.add(mean, emitter.splat(epsilon)))
        scale: ir.Value = emitter.divide(emitter.splat(1.0), root)
        with emitter.loop(size, step=width) as at:
            scaled = emitter.multiply(emitter.load(row, at, FLOAT32), scale)
            emitter.store(emitter.multiply(scaled, emitter.load(weight, at, stored)), target, at, stored)
    return emitter.finish()

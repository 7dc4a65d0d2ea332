"""Root mean square normalisation (arXiv 1910.07467): of rows, with the sum before it, and of heads."""

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import FLOAT32, Elements
from headway_runtime.kernels.cpu.emitter import Emitter

# Below so many numbers, threads cost more than they save.
LEAST_NUMBERS = 1 << 14


class RMSNormKernel:
    """The kernels for one width and epsilon: with a residual sum, and without."""

    __slots__ = ("_add_and_norm", "_norm", "_size")

    def __init__(
        self, size: int, epsilon: float, dtype: torch.dtype, weight_dtype: torch.dtype, width: int
    ) -> None:
        self._size = size
        shape = (size, epsilon, elements(dtype), elements(weight_dtype), width)
        self._norm = Kernel("norm", _text("norm", *shape, adds=False))
        self._add_and_norm = Kernel("add_and_norm", _text("add_and_norm", *shape, adds=True))

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
        return _num_threads(x.numel())


class HeadNormKernel:
    """The kernel that norms the first heads of rows in place, each head by itself."""

    __slots__ = ("_kernel", "_size")

    def __init__(self, num_heads: int, head_dim: int, epsilon: float, dtype: torch.dtype, width: int) -> None:
        self._size = num_heads * head_dim
        text = _head_norm_text("head_norm", num_heads, head_dim, epsilon, elements(dtype), width)
        self._kernel = Kernel("head_norm", text)

    def norm_(self, rows: Tensor, weights: Tensor) -> None:
        """rows: contiguous, at least [rows, heads * head_dim]; weights: float32 [heads, head_dim]."""
        assert rows.is_contiguous()
        assert rows.shape[1] >= self._size
        row_bytes = rows.shape[1] * rows.element_size()
        pointers = (rows.data_ptr(), row_bytes, weights.data_ptr())
        self._kernel.run(_num_threads(len(rows) * self._size), len(rows), *pointers)


def _num_threads(num_numbers: int) -> int:
    return 1 if num_numbers < LEAST_NUMBERS else torch.get_num_threads()


@cache
def _head_norm_text(
    name: str, num_heads: int, head_dim: int, epsilon: float, stored: Elements, width: int
) -> str:
    """A task is one row."""
    emitter = Emitter(name, width)
    num_rows, rows, row_bytes, weights = (emitter.argument(index) for index in range(1, 5))
    with emitter.tasks(emitter.argument_address(0), num_rows) as index:
        row = emitter.offset(rows, (emitter.builder.mul(index, row_bytes), 1))
        with emitter.loop(num_heads) as number:
            head = emitter.offset(row, (number, head_dim * stored.num_bytes))
            weight = emitter.offset(weights, (number, head_dim * FLOAT32.num_bytes))
            squares = emitter.variable(emitter.splat(0.0))
            with emitter.loop(head_dim, step=width) as at:
                x = emitter.load(head, at, stored)
                squares.set(emitter.multiply_add(x, x, squares.get()))
            scale = _scale(emitter, squares.get(), head_dim, epsilon)
            with emitter.loop(head_dim, step=width) as at:
                scaled = emitter.multiply(emitter.load(head, at, stored), scale)
                emitter.store(emitter.multiply(scaled, emitter.load(weight, at, FLOAT32)), head, at, stored)
    return emitter.finish()


def _scale(emitter: Emitter, squares: ir.Value, size: int, epsilon: float) -> ir.Value:
    """One over the root of the mean square."""
    mean = emitter.multiply(emitter.sum_of_lanes(squares), emitter.splat(1.0 / size))
    root = emitter.square_root(emitter.add(mean, emitter.splat(epsilon)))
    return emitter.divide(emitter.splat(1.0), root)


@cache
def _text(
    name: str,
    size: int,
    epsilon: float,
    stored: Elements,
    weight_stored: Elements,
    width: int,
    *,
    adds: bool,
) -> str:
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
        scale = _scale(emitter, squares.get(), size, epsilon)
        with emitter.loop(size, step=width) as at:
            scaled = emitter.multiply(emitter.load(row, at, FLOAT32), scale)
            emitter.store(
                emitter.multiply(scaled, emitter.load(weight, at, weight_stored)), target, at, stored
            )
    return emitter.finish()

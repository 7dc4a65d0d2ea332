"""Weighted sums of a few rows of a table each: how the results of a token's experts become one."""

from functools import cache

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import FLOAT32, Elements
from headway_runtime.kernels.cpu.emitter import Emitter

# Below so many numbers read, threads cost more than they save.
LEAST_NUMBERS = 1 << 14


class WeightedSum:
    """The kernel for rows of one size, so many to a sum. Sums are float32 until they are stored."""

    __slots__ = ("_count", "_kernel", "_size")

    def __init__(self, size: int, count: int, dtype: torch.dtype, width: int) -> None:
        self._size = size
        self._count = count
        self._kernel = Kernel("weighted_sum", _text("weighted_sum", size, count, elements(dtype), width))

    def __call__(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """rows: [any number, size]; places: of those to add up, int64 [sums, count]; weights: float32 alike.

        All contiguous. Returns [sums, size].
        """
        assert rows.shape[1] == self._size
        assert places.shape[1] == self._count
        assert places.shape == weights.shape
        assert weights.dtype == torch.float32
        assert rows.is_contiguous()
        assert places.is_contiguous()
        assert weights.is_contiguous()
        out = rows.new_empty((len(places), self._size))
        num_threads = 1 if out.numel() * self._count < LEAST_NUMBERS else torch.get_num_threads()
        pointers = (rows.data_ptr(), places.data_ptr(), weights.data_ptr(), out.data_ptr())
        self._kernel.run(num_threads, len(out), *pointers)
        return out


@cache
def _text(name: str, size: int, count: int, stored: Elements, width: int) -> str:
    """A task is one sum."""
    emitter = Emitter(name, width)
    num_sums, rows, places, weights, out = (emitter.argument(index) for index in range(1, 6))
    row_bytes = size * stored.num_bytes
    with emitter.tasks(emitter.argument_address(0), num_sums) as index:
        own_places = emitter.offset(places, (index, count * 8))
        own_weights = emitter.offset(weights, (index, count * FLOAT32.num_bytes))
        target = emitter.offset(out, (index, row_bytes))
        terms = []
        for term in range(count):
            place = emitter.load_integer(own_places, emitter.integer(term))
            terms.append((emitter.offset(rows, (place, row_bytes)), emitter.load_number(own_weights, term)))
        with emitter.loop(size, step=width) as at:
            total = emitter.splat(0.0)
            for row, weight in terms:
                total = emitter.multiply_add(emitter.load(row, at, stored), weight, total)
            emitter.store(total, target, at, stored)
    return emitter.finish()

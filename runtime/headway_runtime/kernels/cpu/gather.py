"""Copies blocks of paged KV so that each head's keys, and values, of a sequence lie side by side."""

from functools import cache

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.emitter import Elements, Emitter


class GatherByHead:
    """The kernel for one shape. num_planes: key heads and value heads."""

    __slots__ = ("_kernel",)

    def __init__(self, num_planes: int, plane_bytes: int) -> None:
        name = "gather_by_head"
        self._kernel = Kernel(name, _text(name, num_planes, plane_bytes))

    def __call__(self, blocks: Tensor, table: Tensor, out: Tensor) -> None:
        """blocks: one layer's cache, [blocks, planes, ...]; table: int64 [n]; out: [planes, n, ...]."""
        assert blocks.is_contiguous()
        assert out.is_contiguous()
        assert table.dtype == torch.int64
        self._kernel.run(
            torch.get_num_threads(), len(table), blocks.data_ptr(), table.data_ptr(), out.data_ptr()
        )


@cache
def _text(name: str, num_planes: int, plane_bytes: int) -> str:
    """A task is one block."""
    # Whatever the numbers mean, they are moved as float32.
    moved = Elements("float32", 4)
    emitter = Emitter(name, 16)
    count, blocks, table, out = (emitter.argument(index) for index in range(1, 5))
    with emitter.tasks(emitter.argument_address(0), count) as index:
        block = emitter.offset(blocks, (emitter.load_integer(table, index), num_planes * plane_bytes))
        with emitter.loop(num_planes) as plane:
            source = emitter.offset(block, (plane, plane_bytes))
            target = emitter.offset(
                out, (emitter.builder.mul(plane, count), plane_bytes), (index, plane_bytes)
            )
            with emitter.loop(plane_bytes // 4, step=16) as at:
                emitter.store(emitter.load(source, at, moved), target, at, moved)
    return emitter.finish()

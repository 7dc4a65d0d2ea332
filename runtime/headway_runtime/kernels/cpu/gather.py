"""Copies blocks of paged KV so that each head's keys, and values, of a sequence lie side by side, as they are
computed with: codes become numbers on the way.
"""

from functools import cache

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import Elements
from headway_runtime.kernels.cpu.emitter import Emitter
from headway_runtime.kernels.cpu.kv_layout import KVLayout

# What needs no changing is moved as float32, whatever it means.
MOVED, MOVED_WIDTH = Elements("float32", 4), 16


class GatherByHead:
    """The kernel for one layout. dtype: of what comes out."""

    __slots__ = ("_kernel", "_layout")

    def __init__(self, layout: KVLayout, dtype: torch.dtype, width: int) -> None:
        name = "gather_by_head"
        self._layout = layout
        wanted = elements(dtype)
        self._kernel = Kernel(
            name, _moving(name, layout) if layout.kept == wanted else _widening(name, layout, wanted, width)
        )

    def __call__(self, blocks: Tensor, table: Tensor, out: Tensor) -> None:
        """blocks: one layer's cache (see kv_layout.py), whose first number is looked at for its address.

        table: int64 [n]; out: [planes, n, block_size, head_dim].
        """
        assert blocks.stride(0) * blocks.itemsize == self._layout.block_bytes
        assert out.is_contiguous()
        assert table.dtype == torch.int64
        self._kernel.run(
            torch.get_num_threads(), len(table), blocks.data_ptr(), table.data_ptr(), out.data_ptr()
        )


@cache
def _moving(name: str, layout: KVLayout) -> str:
    """A task is one block."""
    emitter = Emitter(name, MOVED_WIDTH)
    plane_bytes = layout.plane_bytes
    count, blocks, table, out = (emitter.argument(index) for index in range(1, 5))
    with emitter.tasks(emitter.argument_address(0), count) as index:
        block = layout.block(emitter, blocks, emitter.load_integer(table, index))
        with emitter.loop(layout.shape.num_planes) as plane:
            source = layout.keys(emitter, block, plane)
            target = emitter.offset(
                out, (emitter.builder.mul(plane, count), plane_bytes), (index, plane_bytes)
            )
            with emitter.loop(plane_bytes // MOVED.num_bytes, step=MOVED_WIDTH) as at:
                emitter.store(emitter.load(source, at, MOVED), target, at, MOVED)
    return emitter.finish()


@cache
def _widening(name: str, layout: KVLayout, wanted: Elements, width: int) -> str:
    """A task is one block."""
    emitter, shape = Emitter(name, width), layout.shape
    wanted_bytes = shape.head_dim * wanted.num_bytes
    plane_bytes = shape.block_size * wanted_bytes
    count, blocks, table, out = (emitter.argument(index) for index in range(1, 5))
    with emitter.tasks(emitter.argument_address(0), count) as index:
        block = layout.block(emitter, blocks, emitter.load_integer(table, index))
        with emitter.loop(shape.num_planes) as plane:
            source, scales = layout.keys(emitter, block, plane), layout.key_scales(emitter, block, plane)
            target = emitter.offset(
                out, (emitter.builder.mul(plane, count), plane_bytes), (index, plane_bytes)
            )
            with emitter.loop(shape.block_size) as token:
                here = emitter.offset(source, (token, layout.token_bytes))
                there = emitter.offset(target, (token, wanted_bytes))
                factor = layout.factor(emitter, scales, token) if layout.has_scales else None
                for at in range(0, shape.head_dim, width):
                    number = layout.load(emitter, here, at)
                    if factor is not None:
                        number = emitter.multiply(number, factor)
                    emitter.store(number, there, at, wanted)
    return emitter.finish()

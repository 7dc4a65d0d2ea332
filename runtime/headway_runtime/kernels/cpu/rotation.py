"""Rotary embedding and storing of new tokens' keys and values, in one pass over the projections."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import Elements
from headway_runtime.kernels.cpu.emitter import Emitter
from headway_runtime.kernels.cpu.kv_layout import KVLayout


def emit_rotated(
    emitter: Emitter, head: ir.Value, rotation: Sequence[ir.Value], head_dim: int, stored: Elements
) -> Iterator[tuple[int, ir.Value]]:
    """The head at that address rotated, a vector at a time with the index of its first number.

    rotation: addresses of one token's cosines and sines; the sines of the first half are negated.
    """
    cosines, sines = rotation
    half = head_dim // 2
    for at in range(0, half, emitter.width):
        low, high = emitter.load(head, at, stored), emitter.load(head, half + at, stored)
        cosine, sine = emitter.load(cosines, at, stored), emitter.load(sines, half + at, stored)
        yield at, emitter.subtract(emitter.multiply(low, cosine), emitter.multiply(high, sine))
        yield half + at, emitter.multiply_add(high, cosine, emitter.multiply(low, sine))


class RotateAndStore:
    """The kernel for one layout."""

    __slots__ = ("_kernel", "_layout")

    def __init__(self, layout: KVLayout, dtype: torch.dtype, width: int) -> None:
        name = "rotate_and_store"
        self._layout = layout
        self._kernel = Kernel(name, _text(name, layout, elements(dtype), width))

    def __call__(self, qkv: Tensor, cosine: Tensor, sine: Tensor, slots: Tensor, blocks: Tensor) -> None:
        """Rotate queries and keys in place, store keys and values, and leave them as they will be read.

        qkv: [tokens, heads * head_dim]; cosine, sine: [tokens, head_dim].
        slots: where each token is stored, block * block_size + offset, int64.
        blocks: one layer's cache (see kv_layout.py), of which the first number is looked at for its address.
        """
        assert qkv.is_contiguous()
        assert cosine.is_contiguous()
        assert sine.is_contiguous()
        assert slots.dtype == torch.int64
        assert blocks.stride(0) * blocks.itemsize == self._layout.block_bytes
        self._kernel.run(
            torch.get_num_threads(),
            len(slots),
            qkv.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            slots.data_ptr(),
            blocks.data_ptr(),
        )


@cache
def _text(name: str, layout: KVLayout, stored: Elements, width: int) -> str:
    """A task is one token. stored: numbers of `qkv`."""
    emitter = Emitter(name, width)
    builder, integer, shape = emitter.builder, emitter.integer, layout.shape
    tokens, qkv, cosine, sine, slots, blocks = (emitter.argument(index) for index in range(1, 7))
    num_query_heads = shape.num_groups * shape.num_kv_heads
    head_bytes = shape.head_dim * stored.num_bytes
    with emitter.tasks(emitter.argument_address(0), tokens) as token:
        row = emitter.offset(qkv, (token, shape.num_heads * head_bytes))
        rotation = [emitter.offset(one, (token, head_bytes)) for one in (cosine, sine)]
        slot = emitter.load_integer(slots, token)
        block = layout.block(emitter, blocks, builder.sdiv(slot, integer(shape.block_size)))
        place = builder.srem(slot, integer(shape.block_size))
        with emitter.loop(num_query_heads) as head:
            query = emitter.offset(row, (head, head_bytes))
            for at, number in list(emit_rotated(emitter, query, rotation, shape.head_dim, stored)):
                emitter.store(number, query, at, stored)
        with emitter.loop(shape.num_kv_heads) as head:
            key = emitter.offset(row, (integer(num_query_heads), head_bytes), (head, head_bytes))
            value = emitter.offset(key, (integer(shape.num_kv_heads), head_bytes))
            keys = list(emit_rotated(emitter, key, rotation, shape.head_dim, stored))
            for at, number in layout.store(emitter, keys, block, head, place):
                emitter.store(number, key, at, stored)
            values = [(at, emitter.load(value, at, stored)) for at in range(0, shape.head_dim, width)]
            plane = builder.add(head, integer(shape.num_kv_heads))
            for at, number in layout.store(emitter, values, block, plane, place):
                if layout.kept != stored:
                    emitter.store(number, value, at, stored)
    return emitter.finish()

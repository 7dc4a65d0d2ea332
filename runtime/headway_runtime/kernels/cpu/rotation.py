"""Rotary embedding and storing of new tokens' keys and values, in one pass over the projections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.emitter import Elements, Emitter


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one layer. num_groups: query heads that share a KV head."""

    num_kv_heads: int
    num_groups: int
    head_dim: int
    block_size: int

    @property
    def num_heads(self) -> int:
        """Heads of queries, keys and values that one token has."""
        return (self.num_groups + 2) * self.num_kv_heads


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
    """The kernel for one shape."""

    __slots__ = ("_kernel",)

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, width: int) -> None:
        name = "rotate_and_store"
        self._kernel = Kernel(name, _text(name, shape, elements(dtype), width))

    def __call__(self, qkv: Tensor, cosine: Tensor, sine: Tensor, slots: Tensor, blocks: Tensor) -> None:
        """Rotate queries and keys in place, and store keys and values.

        qkv: [tokens, heads * head_dim]; cosine, sine: [tokens, head_dim].
        slots: where each token is stored, block * block_size + offset, int64.
        blocks: one layer's cache, [blocks, 2 * kv_heads, block_size, head_dim].
        """
        assert qkv.is_contiguous()
        assert cosine.is_contiguous()
        assert sine.is_contiguous()
        assert slots.dtype == torch.int64
        assert blocks.is_contiguous()
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
def _text(name: str, shape: AttentionShape, stored: Elements, width: int) -> str:
    """A task is one token."""
    emitter = Emitter(name, width)
    builder, integer = emitter.builder, emitter.integer
    tokens, qkv, cosine, sine, slots, blocks = (emitter.argument(index) for index in range(1, 7))
    num_kv_heads, head_dim, block_size = shape.num_kv_heads, shape.head_dim, shape.block_size
    num_query_heads = shape.num_groups * num_kv_heads
    head_bytes = head_dim * stored.num_bytes
    plane_bytes = block_size * head_bytes
    with emitter.tasks(emitter.argument_address(0), tokens) as token:
        row = emitter.offset(qkv, (token, shape.num_heads * head_bytes))
        rotation = [emitter.offset(one, (token, head_bytes)) for one in (cosine, sine)]
        slot = emitter.load_integer(slots, token)
        place = emitter.offset(
            blocks,
            (builder.sdiv(slot, integer(block_size)), 2 * num_kv_heads * plane_bytes),
            (builder.srem(slot, integer(block_size)), head_bytes),
        )
        with emitter.loop(num_query_heads) as head:
            query = emitter.offset(row, (head, head_bytes))
            for at, number in list(emit_rotated(emitter, query, rotation, head_dim, stored)):
                emitter.store(number, query, at, stored)
        with emitter.loop(num_kv_heads) as head:
            key = emitter.offset(row, (integer(num_query_heads), head_bytes), (head, head_bytes))
            value = emitter.offset(key, (integer(num_kv_heads), head_bytes))
            key_place = emitter.offset(place, (head, plane_bytes))
            value_place = emitter.offset(key_place, (integer(num_kv_heads), plane_bytes))
            for at, number in list(emit_rotated(emitter, key, rotation, head_dim, stored)):
                emitter.store(number, key, at, stored)
                emitter.store(number, key_place, at, stored)
            for at in range(0, head_dim, width):
                emitter.store(emitter.load(value, at, stored), value_place, at, stored)
    return emitter.finish()

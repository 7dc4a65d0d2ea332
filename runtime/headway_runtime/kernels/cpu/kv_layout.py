"""How keys and values lie in the cache's blocks, and the code that reads and writes them there.

In each block lies a plane of each head's keys, [block_size, head_dim], then one of each head's values.
Numbers of one byte (codes) are followed by the scales of all planes, float32 [2 * kv_heads, block_size]: what
one token and head holds is its codes times its scale, and the scale is such that the largest number gets the
largest code. Whatever is not finite makes its scale not a number, so that it cannot hide.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from headway_runtime.kernels.cpu.elements import I8, I16, I32, Elements
from headway_runtime.kernels.cpu.emitter import ROUNDER, Emitter

SCALE_BYTES = 4
# Divided by instead of zero.
LEAST_MAGNITUDE = 1e-30


@dataclass(frozen=True, slots=True)
class Codes:
    """Numbers of one byte that are meant times a scale.

    largest: of them. unit: how many times too small they are when they are read: a power of two.
    """

    name: Literal["int8", "float8_e4m3"]
    largest: float
    unit: float

    @property
    def num_bytes(self) -> int:
        return 1


INT8 = Codes("int8", 127.0, 1.0)
FLOAT8_E4M3 = Codes("float8_e4m3", 448.0, 256.0)


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

    @property
    def num_planes(self) -> int:
        return 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class KVLayout:
    """kept: how the cache holds numbers."""

    shape: AttentionShape
    kept: Elements | Codes

    @property
    def has_scales(self) -> bool:
        return isinstance(self.kept, Codes)

    @property
    def unit(self) -> float:
        """What `load` reads is so many times too small."""
        return self.kept.unit if isinstance(self.kept, Codes) else 1.0

    @property
    def token_bytes(self) -> int:
        """Of one token in one plane, without its scale."""
        return self.shape.head_dim * self.kept.num_bytes

    @property
    def plane_bytes(self) -> int:
        return self.shape.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        scales = self.shape.num_planes * self.shape.block_size * SCALE_BYTES if self.has_scales else 0
        return self.shape.num_planes * self.plane_bytes + scales

    def block(self, emitter: Emitter, blocks: ir.Value, number: ir.Value) -> ir.Value:
        """Address of the block of that number."""
        return emitter.offset(blocks, (number, self.block_bytes))

    def keys(self, emitter: Emitter, block: ir.Value, head: ir.Value) -> ir.Value:
        """Address of the head's keys in the block at that address."""
        return emitter.offset(block, (head, self.plane_bytes))

    def values(self, emitter: Emitter, block: ir.Value, head: ir.Value) -> ir.Value:
        return self.keys(emitter, block, self._value_plane(emitter, head))

    def key_scales(self, emitter: Emitter, block: ir.Value, head: ir.Value) -> ir.Value:
        """Address of the scales of the head's keys."""
        planes = emitter.integer(self.shape.num_planes)
        return emitter.offset(block, (planes, self.plane_bytes), (head, self.shape.block_size * SCALE_BYTES))

    def value_scales(self, emitter: Emitter, block: ir.Value, head: ir.Value) -> ir.Value:
        return self.key_scales(emitter, block, self._value_plane(emitter, head))

    def load(self, emitter: Emitter, address: ir.Value, at: int) -> ir.Value:
        """Numbers of one token, without its scale and `unit`."""
        if isinstance(self.kept, Codes):
            return _number(emitter, emitter.load_bytes(address, at), self.kept)
        return emitter.load(address, at, self.kept)

    def store(
        self,
        emitter: Emitter,
        numbers: Iterable[tuple[int, ir.Value]],
        block: ir.Value,
        plane: ir.Value,
        place: ir.Value,
    ) -> Iterator[tuple[int, ir.Value]]:
        """Put one token's numbers, each vector with the index of its first, at `place` of a plane.

        Yields them as they will be read.
        """
        address = emitter.offset(block, (plane, self.plane_bytes), (place, self.token_bytes))
        if not isinstance(self.kept, Codes):
            for at, number in numbers:
                emitter.store(number, address, at, self.kept)
                yield at, emitter.rounded(number, self.kept)
            return
        known = list(numbers)
        scale, inverse = _scale(emitter, [number for _, number in known], self.kept.largest)
        scale_address = emitter.offset(self.key_scales(emitter, block, plane), (place, SCALE_BYTES))
        emitter.store_number(scale, scale_address)
        factor = emitter.multiply(scale, emitter.splat(self.kept.unit))
        for at, number in known:
            code = _code(emitter, emitter.multiply(number, inverse), self.kept)
            emitter.store_bytes(code, address, at)
            yield at, emitter.multiply(_number(emitter, code, self.kept), factor)

    def factor(self, emitter: Emitter, scales: ir.Value, token: ir.Value) -> ir.Value:
        """What one token's loaded numbers are multiplied by, in all lanes."""
        scale = emitter.load_number(emitter.offset(scales, (token, SCALE_BYTES)), 0)
        return emitter.multiply(scale, emitter.splat(self.unit))

    def _value_plane(self, emitter: Emitter, head: ir.Value) -> ir.Value:
        return emitter.builder.add(head, emitter.integer(self.shape.num_kv_heads))


def _scale(emitter: Emitter, numbers: Sequence[ir.Value], largest_code: float) -> tuple[ir.Value, ir.Value]:
    """The scale of these numbers and what makes them codes, in all lanes."""
    largest, nothing = emitter.absolute(numbers[0]), emitter.splat(0.0)
    for number in numbers:
        largest = emitter.larger(emitter.absolute(number), largest)
        # Zero, or not a number: comparing alone may pass over one.
        nothing = emitter.multiply_add(number, emitter.splat(0.0), nothing)
    highest = emitter.largest_lane(emitter.larger(largest, emitter.splat(0.0)))
    scale = emitter.multiply(highest, emitter.splat(1.0 / largest_code))
    divisor = emitter.larger(highest, emitter.splat(LEAST_MAGNITUDE))
    inverse = emitter.divide(emitter.splat(largest_code), divisor)
    return emitter.add(scale, emitter.sum_of_lanes(nothing)), inverse


def _number(emitter: Emitter, code: ir.Value, codes: Codes) -> ir.Value:
    """What a code says, over its unit."""
    builder = emitter.builder
    if codes.name == "int8":
        return builder.sitofp(builder.sext(code, ir.VectorType(I32, emitter.width)), emitter.vector)
    # Sign, exponent and mantissa stand in a float16 as they stand here, but for a bias of 15 instead of 7.
    # Extending leaves a copy of the sign below it.
    short = ir.VectorType(I16, emitter.width)
    shifted = builder.shl(builder.sext(code, short), ir.Constant(short, [7] * emitter.width))
    bits = builder.and_(shifted, ir.Constant(short, [~0x4000] * emitter.width))
    half = builder.bitcast(bits, ir.VectorType(ir.HalfType(), emitter.width))
    return builder.fpext(half, emitter.vector)


def _code(emitter: Emitter, number: ir.Value, codes: Codes) -> ir.Value:
    """The code nearest to a number that is not beyond the largest; to even in the middle."""
    builder, wide = emitter.builder, ir.VectorType(I32, emitter.width)

    def constant(bits: int) -> ir.Value:
        return ir.Constant(wide, [bits] * emitter.width)

    if codes.name == "int8":
        # So large a number has no room for a fraction, and its last bits are the whole part.
        shifted = emitter.add(number, emitter.splat(ROUNDER))
        return builder.trunc(builder.bitcast(shifted, wide), ir.VectorType(I8, emitter.width))
    magnitude = emitter.absolute(number)
    bits = builder.bitcast(magnitude, wide)
    # Three bits of the mantissa stay, and a bias of 7 instead of 127.
    is_odd = builder.and_(builder.lshr(bits, constant(20)), constant(1))
    carried = builder.add(builder.add(bits, constant(0x7FFFF)), is_odd)
    normal = builder.sub(builder.lshr(carried, constant(20)), constant(120 << 3))
    # Below 2**-6 they are multiples of 2**-9: beside 2**14 there is room for no less.
    beside = builder.bitcast(emitter.add(magnitude, emitter.splat(2.0**14)), wide)
    small = builder.and_(beside, constant(0xF))
    is_small = builder.fcmp_ordered("<", magnitude, emitter.splat(2.0**-6))
    sign = builder.and_(builder.lshr(builder.bitcast(number, wide), constant(24)), constant(0x80))
    code = builder.or_(builder.select(is_small, small, normal), sign)
    return builder.trunc(code, ir.VectorType(I8, emitter.width))

"""What 8- and 4-bit codes stand for, and how a kernel widens 64 bytes of them to pairs of bfloat16.

Every code is a small number, or one of few bits, which bfloat16 holds exactly: a product with it is that of
bfloat16, and what a weight's scale does to it is left to whoever adds up the products. A kernel looks codes
up in tables that registers hold, which AVX-512 does for 64 bytes (VBMI) or 32 words at once.

8 bits: a sign and 7 bits that count magnitudes. The bytes of a lane of 16 are two inputs of four outputs, and
then the next two inputs of them. 4 bits: the 32 bits of an output are four even inputs in the lower half and
four odd ones in the upper, lowest first. `strips.py` packs them so.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from llvmlite import ir

from headway_runtime.kernels.cpu.elements import BFLOAT16_PAIRS, I8, I16, I32
from headway_runtime.kernels.cpu.emitter import Emitter

VECTOR_BYTES = 64
NUM_MAGNITUDES = 128
SIGN_BIT = 0x80
# In two's complement the lowest code has no opposite: it is written as the zero with a sign.
LOWEST = -128
NIBBLE_BITS = 4
# A zero point between these leaves differences of 5 bits.
LEAST_ZERO, MOST_ZERO = 0, 16
NIBBLE_ZERO = 8

BYTES, WORDS, LONGS = ir.VectorType(I8, 64), ir.VectorType(I16, 32), ir.VectorType(I32, 16)


@dataclass(frozen=True, slots=True)
class ByteCodes:
    """Signs and magnitudes. magnitudes: as bfloat16; has_lowest: whether the zero with a sign is -128.

    inputs_per_vector: how many of each of 16 outputs are in 64 bytes.
    """

    magnitudes: tuple[int, ...]
    has_lowest: bool = False
    inputs_per_vector: int = 4
    has_zeros: bool = False

    def widened(self, emitter: Emitter, codes: ir.Value, zeros: ir.Value | None) -> list[ir.Value]:
        """Pairs of inputs of 16 outputs, the first inputs first. codes: 64 bytes. zeros: None."""
        assert zeros is None
        builder = emitter.builder
        codes = builder.bitcast(codes, BYTES)
        low = self._looked_up(emitter, codes, [bits & 0xFF for bits in self.magnitudes])
        high = self._looked_up(emitter, codes, [bits >> 8 for bits in self.magnitudes])
        sign = _all(BYTES, SIGN_BIT)
        high = builder.or_(high, builder.and_(codes, sign))
        if self.has_lowest:
            is_lowest = builder.icmp_unsigned("==", codes, sign)
            high = builder.select(is_lowest, _all(BYTES, bfloat16_bits([LOWEST])[0] >> 8), high)
        vectors = []
        for half in (0, 8):
            # The instruction that interleaves does so within each lane of 16 bytes.
            order = [
                lane + half + index + source
                for lane in range(0, 64, 16)
                for index in range(8)
                for source in (0, 64)
            ]
            mask = ir.Constant(ir.VectorType(I32, 64), order)
            vectors.append(builder.bitcast(builder.shuffle_vector(low, high, mask), BFLOAT16_PAIRS))
        return vectors

    @staticmethod
    def _looked_up(emitter: Emitter, codes: ir.Value, table: list[int]) -> ir.Value:
        """The sign, which is no part of the index, is not looked at."""
        first, second = (ir.Constant(BYTES, table[start : start + 64]) for start in (0, 64))
        return emitter.call("llvm.x86.avx512.vpermi2var.qi.512", BYTES, first, codes, second)


@dataclass(frozen=True, slots=True)
class NibbleCodes:
    """Codes 0 to 15 that stand for what they are above a zero point, which is 8 or each group's own."""

    has_zeros: bool = False
    inputs_per_vector: int = 8

    def widened(self, emitter: Emitter, codes: ir.Value, zeros: ir.Value | None) -> list[ir.Value]:
        """As that of `ByteCodes`. zeros: of `zero_words`, or None without."""
        builder = emitter.builder
        codes = builder.bitcast(codes, LONGS)
        vectors = []
        for index in range(self.inputs_per_vector // 2):
            # The table's index are the lower five bits; above the four of the code may lie anything.
            shift = ir.Constant(LONGS, [NIBBLE_BITS * index] * 16)
            words = builder.bitcast(builder.lshr(codes, shift), WORDS)
            if zeros is None:
                numbers = [code % 16 - NIBBLE_ZERO for code in range(32)]
            else:
                words = builder.sub(builder.and_(words, _all(WORDS, 0xF)), zeros)
                numbers = [*range(16), *range(-16, 0)]
            table = ir.Constant(WORDS, bfloat16_bits(numbers))
            found = emitter.call("llvm.x86.avx512.permvar.hi.512", WORDS, table, words)
            vectors.append(builder.bitcast(found, BFLOAT16_PAIRS))
        return vectors


Codes: TypeAlias = ByteCodes | NibbleCodes


def zero_words(emitter: Emitter, address: ir.Value) -> ir.Value:
    """The zero points of 16 outputs, bytes in memory, for both inputs of each pair."""
    builder = emitter.builder
    kind = ir.VectorType(I8, 16)
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 16
    wide = builder.zext(loaded, LONGS)
    both = builder.or_(wide, builder.shl(wide, ir.Constant(LONGS, [16] * 16)))
    return builder.bitcast(both, WORDS)


def bfloat16_bits(numbers: list[int] | torch.Tensor) -> list[int]:
    """Numbers that bfloat16 holds exactly, as it lies in memory."""
    exact = torch.as_tensor(numbers, dtype=torch.float32)
    rounded = exact.to(torch.bfloat16)
    assert torch.equal(rounded.float().nan_to_num(), exact.nan_to_num())
    return [bits & 0xFFFF for bits in rounded.view(torch.int16).tolist()]


def _all(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)

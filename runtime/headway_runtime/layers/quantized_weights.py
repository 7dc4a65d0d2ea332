"""Quantized weights of one projection as they lie in memory, whichever tool wrote them, and what they mean.

`dequantized` is the meaning: every product, in torch or in a kernel of ours, is held against it. Knows
nothing of files, of names of tensors, or of how a product is computed.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# What a 4-bit code stands for 0 where there are no zero points, and the largest code.
INT4_ZERO = 8
INT4_LARGEST = 15
# Bits of an 8-bit float that is not a number, and that of the sign, with which it is none either.
FP8_NO_NUMBER = 0xFF
FP8_SIGN = 0x80
# Codes that are looked at in one go.
CHECKED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Int8Input:
    """What a product with quantized inputs does to its input first: x becomes whole numbers of 8 bits.

    scale: the step between two numbers, for all of x; None: for each row its own, so that its largest
        magnitude (without zero point) or its whole range (with one) just fits.
    zero: the number that 0 becomes, with a `scale`.
    is_symmetric: whether rows without `scale` go without zero point.
    """

    scale: float | None = None
    zero: int = 0
    is_symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """w = code * scale of its output.

    codes: int8 [outputs, inputs]. scales: float32 [outputs].
    input: how x is quantized too; None leaves it as it is.
    """

    codes: Tensor
    scales: Tensor
    input: Int8Input | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, first: int, last: int) -> "Int8Weight":
        """Those outputs alone, without a copy."""
        return Int8Weight(self.codes[first:last], self.scales[first:last], self.input)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        return (self.codes.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8GroupWeight:
    """w = (code - zero) * scale, both of groups of inputs: 8-bit weights that `Int8Weight` cannot hold.

    codes: int8 [outputs, inputs].
    scales: float32 [outputs, inputs // group_size]. zeros: as scales; None stands for 0 everywhere.
    input_order: int64 [inputs] or None, as that of `Int4Weight`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    input_order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + _bytes(self.zeros) + _bytes(self.input_order)

    def rows(self, first: int, last: int) -> "Int8GroupWeight":
        """Those outputs alone, without a copy."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        return Int8GroupWeight(
            self.codes[first:last], self.scales[first:last], zeros, self.group_size, self.input_order
        )

    def ordered(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs] for inputs in `input_order`."""
        grouped = self.codes.view(len(self.codes), -1, self.group_size).float()
        zeros = 0 if self.zeros is None else self.zeros[:, :, None]
        return ((grouped - zeros) * self.scales[:, :, None]).to(dtype).flatten(1)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], for inputs in the model's own order."""
        return in_own_order(self.ordered(dtype), self.input_order)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w = (code - zero) * scale, both of groups of inputs.

    codes: uint8 [outputs, inputs // 2], the low nibble is the even input.
    scales: float32 [outputs, inputs // group_size]. zeros: as scales; None stands for `INT4_ZERO` everywhere.
    input_order: int64 [inputs] or None. Column j belongs to x[input_order[j]]: x is permuted by it first.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    input_order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + _bytes(self.zeros) + _bytes(self.input_order)

    def rows(self, first: int, last: int) -> "Int4Weight":
        """Those outputs alone, without a copy."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        return Int4Weight(
            self.codes[first:last], self.scales[first:last], zeros, self.group_size, self.input_order
        )

    def ordered(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs] for inputs in `input_order`."""
        grouped = unpacked_nibbles(self.codes).view(len(self.codes), -1, self.group_size).float()
        zeros = INT4_ZERO if self.zeros is None else self.zeros[:, :, None]
        return ((grouped - zeros) * self.scales[:, :, None]).to(dtype).flatten(1)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], for inputs in the model's own order."""
        return in_own_order(self.ordered(dtype), self.input_order)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """w = code * scale, of its output or of its block.

    codes: float8_e4m3fn [outputs, inputs].
    scales: float32 [outputs], or [outputs / block rows, inputs / block columns] rounded up with `block`.
    block: rows and columns of a block; None where every output has a scale.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, first: int, last: int) -> "Fp8Weight":
        """Those outputs alone, without a copy. `first` begins a block."""
        if self.block is None:
            return Fp8Weight(self.codes[first:last], self.scales[first:last])
        height = self.block[0]
        assert first % height == 0
        return Fp8Weight(
            self.codes[first:last], self.scales[first // height : -(-last // height)], self.block
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        outputs, inputs = self.shape
        scales = self.scales[:, None]
        if self.block is not None:
            height, width = self.block
            scales = self.scales.repeat_interleave(height, 0)[:outputs]
            scales = scales.repeat_interleave(width, 1)[:, :inputs]
        return (self.codes.float() * scales).to(dtype)


QuantizedWeight: TypeAlias = Int8Weight | Int8GroupWeight | Int4Weight | Fp8Weight


def holds_no_numbers(codes: Tensor) -> bool:
    """Whether some of these float8_e4m3fn codes, [rows, columns], are none: all bits but the sign's are set.

    By bytes, in pieces: a tenth of the time that turning codes into numbers takes, and hardly any memory.
    """
    numbers, rows = codes.view(torch.uint8), max(1, CHECKED_BYTES // max(1, codes.shape[1]))
    pieces = (numbers[first : first + rows] for first in range(0, len(numbers), rows))
    return any(bool((piece | FP8_SIGN).amax() == FP8_NO_NUMBER) for piece in pieces)


def unpacked_nibbles(codes: Tensor) -> Tensor:
    """uint8 [outputs, inputs] of uint8 [outputs, inputs // 2]."""
    return torch.stack((codes & INT4_LARGEST, codes >> 4), dim=-1).flatten(1)


def packed_nibbles(codes: Tensor) -> Tensor:
    """uint8 [outputs, inputs // 2] of integers 0 to 15 [outputs, inputs]."""
    pairs = codes.to(torch.uint8).view(len(codes), -1, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4)


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def in_own_order(weight: Tensor, order: Tensor | None) -> Tensor:
    """[outputs, the model's inputs] of [outputs, inputs in `order`].

    What fills up the groups of a cut weight is 0, whichever input it names.
    """
    if order is None:
        return weight
    num_inputs = len(order) if order.is_meta else int(order.max()) + 1
    return weight.new_zeros((len(weight), num_inputs)).index_add_(1, order, weight)

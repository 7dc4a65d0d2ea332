"""Makes linear layers of weights in int8, int4 and float8: which strips they become, and how to pack them.

None where a weight has no kernel: sizes that no vector divides, zero points that are no small whole numbers.
"""

from collections.abc import Iterator, Sequence
from functools import cache, reduce
from math import gcd

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.codes import (
    LEAST_ZERO,
    LOWEST,
    MOST_ZERO,
    NIBBLE_BITS,
    NIBBLE_ZERO,
    NUM_MAGNITUDES,
    ByteCodes,
    Codes,
    NibbleCodes,
    bfloat16_bits,
)
from headway_runtime.kernels.cpu.elements import FLOAT32, Elements
from headway_runtime.kernels.cpu.grouped_linear import GroupedLinear
from headway_runtime.kernels.cpu.integer_linear import MOST_INPUTS, QUADRUPLE, IntegerLinear
from headway_runtime.kernels.cpu.processor import has_features
from headway_runtime.kernels.cpu.row_numbers import WIDTH as ROW_WIDTH
from headway_runtime.kernels.cpu.row_numbers import RowQuantizer
from headway_runtime.kernels.cpu.strips import (
    PANEL,
    Layout,
    Part,
    Strips,
    group_inputs_of,
    num_panels_of,
)

FLOAT16 = Elements("float16", 2)
HALF_BITS, LOWER_HALF = 16, 0xFFFF
# With more inputs to a scale, its bytes do not matter.
FEW_INPUTS_PER_SCALE = 128
# What is multiplied, and the tables of 128 bytes that codes are looked up in.
NEEDED_FOR_INTEGERS = ("avx512bf16", "avx512bw", "avx512vnni")
NEEDED = ("avx512bf16", "avx512bw", "avx512vbmi")


def can_run() -> bool:
    return has_features(*NEEDED)


def int8_linear(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    bias: Tensor | None,
    input_order: Tensor | None = None,
) -> GroupedLinear | None:
    """Parts, one below the other. codes: int8 [outputs, inputs]; scales: float32 [outputs, groups]."""
    has_lowest = any(int(part.min()) == LOWEST for part in codes)
    kind = ByteCodes(_int8_magnitudes(), has_lowest)
    return _linear(kind, codes, scales, None, bias, input_order)


def fp8_linear(
    codes: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> GroupedLinear | None:
    """codes: float8_e4m3fn [outputs, inputs]; else as `int8_linear`."""
    return _linear(ByteCodes(_fp8_magnitudes()), codes, scales, None, bias, None)


def int4_linear(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor | None],
    bias: Tensor | None,
    input_order: Tensor | None = None,
) -> GroupedLinear | None:
    """codes: uint8 [outputs, inputs / 2], even inputs in the low nibbles; zeros: as scales, or None for 8."""
    if all(zero is None or bool((zero == NIBBLE_ZERO).all()) for zero in zeros):
        return _linear(NibbleCodes(), codes, scales, None, bias, input_order)
    given = [
        torch.full_like(scale, NIBBLE_ZERO) if zero is None else zero
        for zero, scale in zip(zeros, scales, strict=True)
    ]
    for zero in given:
        if not bool(((zero == zero.round()) & (zero >= LEAST_ZERO) & (zero <= MOST_ZERO)).all()):
            return None
    return _linear(NibbleCodes(has_zeros=True), codes, scales, given, bias, input_order)


def integer_linear(
    codes: Sequence[Tensor], scales: Sequence[Tensor], quantizer: RowQuantizer, bias: Tensor | None
) -> IntegerLinear | None:
    """As `int8_linear`, with a scale for each output, on inputs that `quantizer` turns into whole numbers."""
    num_inputs = codes[0].shape[1]
    if num_inputs % ROW_WIDTH or num_inputs > MOST_INPUTS or any(len(part) % PANEL for part in codes):
        return None
    if not has_features(*NEEDED_FOR_INTEGERS):
        return None
    strips = Strips(
        Layout(QUADRUPLE, num_panels_of([len(part) for part in codes]), FLOAT32), 1, num_inputs // QUADRUPLE
    )
    parts = (
        Part(part.contiguous().view(torch.int32), scale) for part, scale in zip(codes, scales, strict=True)
    )
    weight = strips.pack(parts, sum(len(part) for part in codes))
    sums = torch.cat([part.sum(1, dtype=torch.int32) for part in codes])
    return IntegerLinear(strips, weight, sums, quantizer, bias)


def above_zero(codes: Tensor, zeros: Tensor) -> Tensor | None:
    """Codes of 8 bits as int8 above their zero points; None where they do not fit.

    codes: 8 bits, with sign or without, [outputs, inputs]; zeros: float32 [outputs, groups].
    """
    if not bool((zeros == zeros.round()).all()):
        return None
    by_group = codes.view(*zeros.shape, -1).to(torch.int16)
    above = by_group.sub_(zeros.to(torch.int16).unsqueeze(2))
    limits = torch.iinfo(torch.int8)
    if int(above.min()) < limits.min or int(above.max()) > limits.max:
        return None
    return above.to(torch.int8).flatten(1)


def _linear(
    kind: Codes,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor] | None,
    bias: Tensor | None,
    input_order: Tensor | None,
) -> GroupedLinear | None:
    num_inputs = codes[0].shape[1] * (2 if isinstance(kind, NibbleCodes) else 1)
    inputs_per_scale = reduce(gcd, (num_inputs // scale.shape[1] for scale in scales))
    group_inputs = group_inputs_of(inputs_per_scale, kind.inputs_per_vector)
    if group_inputs is None or any(len(part) % PANEL for part in codes):
        return None
    is_exact = inputs_per_scale <= FEW_INPUTS_PER_SCALE and all(_fits_float16(scale) for scale in scales)
    layout = Layout(
        kind.inputs_per_vector,
        num_panels_of([len(part) for part in codes]),
        FLOAT16 if is_exact else FLOAT32,
        kind.has_zeros,
    )
    num_groups = num_inputs // group_inputs

    def parts() -> Iterator[Part]:
        """One after the other, so that no more than one is there twice."""
        for index, part in enumerate(codes):
            packed = _nibbles(part) if isinstance(kind, NibbleCodes) else _bytes(part)
            repeats = num_groups // scales[index].shape[1]
            zero = None if zeros is None else zeros[index].to(torch.uint8).repeat_interleave(repeats, 1)
            yield Part(packed, scales[index].repeat_interleave(repeats, 1), zero)

    strips = Strips(layout, num_groups, group_inputs // kind.inputs_per_vector)
    weight = strips.pack(parts(), sum(len(part) for part in codes))
    return GroupedLinear(kind, strips, weight, bias, input_order)


def _bytes(codes: Tensor) -> Tensor:
    """Signs and magnitudes: float8 is made of them, int8 is turned into them from two's complement.

    Of four outputs and four inputs, four numbers: the first two inputs of two outputs each, then the others.
    """
    codes = codes.contiguous()
    if codes.dtype == torch.int8:
        # The lowest has no magnitude of its own: its sign is left.
        codes = codes.abs().bitwise_or_(codes.bitwise_and(LOWEST))
    longs = codes.view(torch.int32)
    even, odd = longs[::2], longs[1::2]
    lower = (even & LOWER_HALF).bitwise_or_(odd << HALF_BITS)
    upper = ((even >> HALF_BITS) & LOWER_HALF).bitwise_or_(odd & ~LOWER_HALF)
    num_columns = longs.shape[1]
    return torch.stack((lower.view(-1, 2, num_columns), upper.view(-1, 2, num_columns)), 1).flatten(0, 2)


def _nibbles(codes: Tensor) -> Tensor:
    """Eight nibbles each: those of even inputs in the lower half, those of odd inputs in the upper."""
    longs = codes.contiguous().view(torch.int32).clone()
    # The second and third of four swap places, nibbles first and then bytes.
    for shift, mask in ((NIBBLE_BITS, 0x00F000F0), (2 * NIBBLE_BITS, 0x0000FF00)):
        changed = (longs >> shift).bitwise_xor_(longs).bitwise_and_(mask)
        longs.bitwise_xor_(changed).bitwise_xor_(changed.bitwise_left_shift_(shift))
    return longs


def _fits_float16(scales: Tensor) -> bool:
    return bool((scales.half().float() == scales).all())


@cache
def _int8_magnitudes() -> tuple[int, ...]:
    return tuple(bfloat16_bits(list(range(NUM_MAGNITUDES))))


@cache
def _fp8_magnitudes() -> tuple[int, ...]:
    every = torch.arange(NUM_MAGNITUDES, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return tuple(bfloat16_bits(every.float()))

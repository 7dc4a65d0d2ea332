"""Rows of bfloat16 as whole numbers of 8 bits, for products of them: each row by its scale, or all by one.

A number is `(byte - offset) * scale` of its row, or nearly: bytes without signs, because that is what the
processor multiplies by signed ones.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.elements import BFLOAT16, I8, I32
from headway_runtime.kernels.cpu.emitter import ROUNDER, Emitter

WIDTH = 16
LEAST, MOST = -128.0, 127.0
# What makes bytes of signed numbers.
BYTE_OFFSET = 128.0
# Of a row of zeros.
LEAST_SCALE = 1e-12
# Below so many numbers, threads cost more than they save.
LEAST_NUMBERS = 1 << 14

# How a row's scale is found: its largest magnitude becomes 127; its range, with 0, 255 steps; or it is given.
Scaling = Literal["magnitude", "range", "given"]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """numbers: uint8 [rows, inputs]. scaling: float32 [rows, 2], of each row its scale and its offset.

    A row with a number that is none, or infinite, has a scale that is none.
    """

    numbers: Tensor
    scaling: Tensor


class RowQuantizer:
    """The kernel for one way to find scales. scale: the given one; zero: the number that is 0 then."""

    __slots__ = ("_given", "_kernel")

    def __init__(self, scaling: Scaling, scale: float = 1.0, zero: int = 0) -> None:
        self._given = torch.tensor([scale, float(zero)])
        self._kernel = Kernel("row_numbers", _text("row_numbers", scaling))

    def __call__(self, x: Tensor) -> RowNumbers:
        """x: contiguous bfloat16 [rows, inputs], inputs a multiple of WIDTH."""
        num_rows, num_inputs = x.shape
        assert x.is_contiguous()
        assert num_inputs % WIDTH == 0
        numbers = torch.empty((num_rows, num_inputs), dtype=torch.uint8)
        scaling = torch.empty((num_rows, 2))
        self._kernel.run(
            1 if x.numel() < LEAST_NUMBERS else torch.get_num_threads(),
            x.data_ptr(),
            num_rows,
            num_inputs,
            self._given.data_ptr(),
            numbers.data_ptr(),
            scaling.data_ptr(),
        )
        return RowNumbers(numbers, scaling)


@cache
def _text(name: str, scaling: Scaling) -> str:
    """A task is one row."""
    emitter = Emitter(name, WIDTH)
    builder = emitter.builder
    x, rows, inputs, given, numbers, scalings = (emitter.argument(index) for index in range(1, 7))
    bytes_kind = ir.VectorType(I8, WIDTH)
    with emitter.tasks(emitter.argument_address(0), rows) as row:
        own_x = builder.add(x, builder.mul(builder.mul(row, inputs), emitter.integer(BFLOAT16.num_bytes)))
        least, most, spoiler = _extremes(emitter, own_x, inputs)
        scale, zero = _scale_and_zero(emitter, scaling, least, most, given)
        low, high = (emitter.subtract(emitter.splat(end), zero) for end in (LEAST, MOST))
        offset = emitter.add(zero, emitter.splat(BYTE_OFFSET))
        # So large a number has no room for a fraction, and its last byte is the whole part's.
        shift = emitter.add(offset, emitter.splat(ROUNDER))
        own_numbers = builder.add(numbers, builder.mul(row, inputs))
        with emitter.loop(inputs, step=WIDTH) as at:
            number = _rounded(emitter, emitter.divide(emitter.load(own_x, at, BFLOAT16), scale))
            number = emitter.smaller(emitter.larger(number, low), high)
            longs = builder.bitcast(emitter.add(number, shift), ir.VectorType(I32, WIDTH))
            place = builder.inttoptr(builder.add(own_numbers, at), bytes_kind.as_pointer())
            builder.store(builder.trunc(longs, bytes_kind), place).align = 1
        own_scaling = emitter.offset(scalings, (row, 8))
        emitter.store_lanes(emitter.add(scale, spoiler), 0, 1, own_scaling, 0)
        emitter.store_lanes(offset, 0, 1, own_scaling, 1)
    return emitter.finish()


def _extremes(emitter: Emitter, x: ir.Value, inputs: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """A row's least and largest number, or 0 beyond them; and 0, or no number where one of them is none."""
    least, most, spoiler = (emitter.variable(emitter.splat(0.0)) for _ in range(3))
    with emitter.loop(inputs, step=WIDTH) as at:
        number = emitter.load(x, at, BFLOAT16)
        least.set(emitter.smaller(number, least.get()))
        most.set(emitter.larger(number, most.get()))
        spoiler.set(emitter.multiply_add(number, emitter.splat(0.0), spoiler.get()))
    lowest = emitter.negative(emitter.largest_lane(emitter.negative(least.get())))
    return lowest, emitter.largest_lane(most.get()), emitter.sum_of_lanes(spoiler.get())


def _scale_and_zero(
    emitter: Emitter, scaling: Scaling, least: ir.Value, most: ir.Value, given: ir.Value
) -> tuple[ir.Value, ir.Value]:
    match scaling:
        case "given":
            return emitter.load_number(given, 0), emitter.load_number(given, 1)
        case "magnitude":
            magnitude = emitter.larger(most, emitter.negative(least))
            scale = emitter.divide(magnitude, emitter.splat(MOST))
            return emitter.larger(scale, emitter.splat(LEAST_SCALE)), emitter.splat(0.0)
        case "range":
            scale = emitter.divide(emitter.subtract(most, least), emitter.splat(MOST - LEAST))
            scale = emitter.larger(scale, emitter.splat(LEAST_SCALE))
            steps = _rounded(emitter, emitter.subtract(emitter.splat(LEAST), emitter.divide(least, scale)))
            # It lies between them, but for rows that are spoilt.
            return scale, emitter.smaller(emitter.larger(steps, emitter.splat(LEAST)), emitter.splat(MOST))


def _rounded(emitter: Emitter, value: ir.Value) -> ir.Value:
    """To the nearest whole number, to even in the middle; of no use beyond 2**22."""
    return emitter.subtract(emitter.add(value, emitter.splat(ROUNDER)), emitter.splat(ROUNDER))

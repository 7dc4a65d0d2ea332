"""Linear layers of 8-bit weights whose inputs are turned into 8-bit whole numbers too (W8A8).

Products and their sums are whole numbers, exact in 32 bits (AVX-512 VNNI): four inputs of 16 outputs with one
instruction, twice as many as in bfloat16. A tile of rows and panels is summed as in `linear.py`, and weights
lie in strips, a single group of inputs each, four inputs of an output side by side.
"""

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.elements import BFLOAT16, FLOAT32, I32
from headway_runtime.kernels.cpu.emitter import Emitter
from headway_runtime.kernels.cpu.row_numbers import RowQuantizer
from headway_runtime.kernels.cpu.strips import PANEL, Layout, Strips

# A tile: as many sums as registers hold beside a quadruple of each row and panel.
TILE_ROWS = 6
# Tiles of what is left over, in turn.
REST_ROWS = (4, 2, 1)
QUADRUPLE = 4
VECTOR_BYTES = 64
# How far ahead of what is multiplied weights are asked for.
PREFETCH_BYTES = 4096
# Numbers of so many rows are multiplied by one strip after the other: they stay in a core's cache.
ROWS_AT_ONCE_NUMBERS = 400_000
# More products than these might not fit 32 bits.
MOST_INPUTS = 65_000
LONGS = ir.VectorType(I32, PANEL)


class IntegerLinear:
    """y = (numbers of x) @ codes.T * both scales (+ bias)"""

    __slots__ = ("_bias", "_kernel", "_quantizer", "_strips", "_sums", "num_inputs", "num_outputs", "weight")

    def __init__(
        self, strips: Strips, weight: Tensor, sums: Tensor, quantizer: RowQuantizer, bias: Tensor | None
    ) -> None:
        """weight: what `strips` packed. sums: int32 [outputs], of each output's codes. bias: bfloat16."""
        self.num_inputs, self.num_outputs = strips.num_inputs, len(sums)
        self.weight = weight
        self._strips, self._sums, self._quantizer, self._bias = strips, sums, quantizer, bias
        name = "integer_linear"
        self._kernel = Kernel(name, _text(name, strips.layout, has_bias=bias is not None))

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous bfloat16 [rows, inputs]. Returns [rows, outputs]."""
        num_rows = len(x)
        assert x.shape[1] == self.num_inputs
        assert x.dtype == torch.bfloat16
        quantized = self._quantizer(x)
        out = x.new_empty((num_rows, self.num_outputs))
        at_once = max(TILE_ROWS, ROWS_AT_ONCE_NUMBERS // self.num_inputs // TILE_ROWS * TILE_ROWS)
        self._kernel.run(
            torch.get_num_threads(),
            quantized.numbers.data_ptr(),
            quantized.scaling.data_ptr(),
            self.weight.data_ptr(),
            self._sums.data_ptr(),
            out.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            num_rows,
            min(at_once, max(1, num_rows)),
            self.num_inputs,
            self.num_outputs,
            len(self.weight),
        )
        return out


@cache
def _text(name: str, layout: Layout, *, has_bias: bool) -> str:
    return _Writer(Emitter(name, PANEL), layout, has_bias=has_bias).written()


class _Writer:
    """Writes the kernel. A task is a strip and the rows that meet it at once."""

    def __init__(self, emitter: Emitter, layout: Layout, *, has_bias: bool) -> None:
        self._emitter, self._builder = emitter, emitter.builder
        self._layout, self._has_bias = layout, has_bias
        self._panels = range(layout.num_panels)
        arguments = [emitter.argument(index) for index in range(1, 12)]
        self._numbers, self._scaling, self._weight, self._sums, self._out, self._bias, *counts = arguments
        self._rows, self._at_once, self._inputs, self._outputs, self._num_strips = counts
        self._num_steps = self._builder.sdiv(self._inputs, emitter.integer(QUADRUPLE))
        self._strip_bytes = emitter.offset(
            emitter.integer(layout.codes_offset), (self._num_steps, layout.step_bytes)
        )

    def written(self) -> str:
        emitter, builder = self._emitter, self._builder
        blocks = builder.sdiv(
            builder.add(self._rows, builder.sub(self._at_once, emitter.integer(1))), self._at_once
        )
        with emitter.tasks(emitter.argument_address(0), builder.mul(blocks, self._num_strips)) as task:
            strip = builder.srem(task, self._num_strips)
            first = builder.mul(builder.sdiv(task, self._num_strips), self._at_once)
            end = emitter.smaller_integer(builder.add(first, self._at_once), self._rows)
            left = builder.srem(builder.sub(end, first), emitter.integer(TILE_ROWS))
            last = builder.sub(end, left)
            with emitter.loop(last, start=first, step=TILE_ROWS) as row:
                self._tile(row, TILE_ROWS, strip)
            for count in REST_ROWS:
                has_them = builder.and_(left, emitter.integer(count))
                with builder.if_then(builder.icmp_signed("!=", has_them, emitter.integer(0))):
                    before = builder.and_(left, emitter.integer(-2 * count))
                    self._tile(builder.add(last, before), count, strip)
        return emitter.finish()

    def _tile(self, first: ir.Value, count: int, strip: ir.Value) -> None:
        """`count` rows from `first` on times a strip."""
        emitter, builder = self._emitter, self._builder
        place = builder.add(self._weight, builder.mul(strip, self._strip_bytes))
        codes = emitter.offset(place, (emitter.integer(self._layout.codes_offset), 1))
        rows = [builder.add(first, emitter.integer(row)) for row in range(count)]
        own_numbers = [builder.add(self._numbers, builder.mul(row, self._inputs)) for row in rows]
        nothing = ir.Constant(LONGS, [0] * PANEL)
        sums = [[emitter.variable(nothing) for _ in self._panels] for _ in rows]
        with emitter.loop(self._num_steps) as step:
            at = emitter.offset(codes, (step, self._layout.step_bytes))
            vectors = [self._load_longs(at, panel) for panel in self._panels]
            ahead = emitter.offset(at, (emitter.integer(PREFETCH_BYTES), 1))
            emitter.prefetch(ahead, self._layout.step_bytes)
            for numbers, row_sums in zip(own_numbers, sums, strict=True):
                four = self._load_four(emitter.offset(numbers, (step, QUADRUPLE)))
                for vector, total in zip(vectors, row_sums, strict=True):
                    instruction = "llvm.x86.avx512.vpdpbusd.512"
                    total.set(emitter.call(instruction, LONGS, total.get(), four, vector))
        columns = builder.mul(strip, emitter.integer(self._layout.num_outputs))
        for panel in self._panels:
            self._finish_panel(panel, columns, place, rows, [row_sums[panel].get() for row_sums in sums])

    def _finish_panel(
        self, panel: int, columns: ir.Value, place: ir.Value, rows: list[ir.Value], sums: list[ir.Value]
    ) -> None:
        """Whole sums of some rows become outputs."""
        emitter, builder = self._emitter, self._builder
        scale = emitter.load(place, panel * PANEL, self._layout.scales)
        own = builder.add(columns, emitter.integer(panel * PANEL))
        of_codes = self._load_longs(emitter.offset(self._sums, (own, FLOAT32.num_bytes)), 0)
        begin = emitter.load(self._bias, own, BFLOAT16) if self._has_bias else emitter.splat(0.0)
        for row, total in zip(rows, sums, strict=True):
            scaling = emitter.offset(self._scaling, (row, 2 * FLOAT32.num_bytes))
            offset = builder.fptosi(emitter.load_number(scaling, 1), LONGS)
            exact = builder.sub(total, builder.mul(offset, of_codes))
            number = builder.sitofp(exact, emitter.vector)
            both = emitter.multiply(scale, emitter.load_number(scaling, 0))
            out_row = emitter.offset(self._out, (builder.mul(row, self._outputs), BFLOAT16.num_bytes))
            emitter.store(emitter.multiply_add(number, both, begin), out_row, own, BFLOAT16)

    def _load_longs(self, address: ir.Value, index: int) -> ir.Value:
        """16 numbers of 32 bits."""
        place = self._emitter.offset(address, (self._emitter.integer(index), VECTOR_BYTES))
        loaded = self._builder.load(self._builder.inttoptr(place, LONGS.as_pointer()))
        loaded.align = FLOAT32.num_bytes
        return loaded

    def _load_four(self, address: ir.Value) -> ir.Value:
        """The same four bytes for all lanes."""
        return self._builder.bitcast(self._emitter.load_number(address, 0), LONGS)

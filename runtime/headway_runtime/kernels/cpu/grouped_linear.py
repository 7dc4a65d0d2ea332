"""Linear layers of 8- and 4-bit weights with a scale for each output and group of inputs; x stays bfloat16.

A group's products with the codes are summed in float32, pair of inputs by pair, and its sum times the scale is
added to the total of the groups before. So every row's numbers are added in one order, whatever other rows
there are and however the work is shared out.

Few rows wait for memory alone: codes are widened in registers while a strip streams by. For more rows a group's
codes are widened once into memory that stays in the nearest cache, and tiles of rows are multiplied with it.
"""

from collections.abc import Callable
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.codes import VECTOR_BYTES, zero_words
from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.emitter import BFLOAT16, FLOAT32, Emitter
from headway_runtime.kernels.cpu.strips import MOST_GROUP_INPUTS, PANEL, Layout, Strips

# A tile: as many sums as registers hold beside a pair of each row and panel.
TILE_ROWS = 6
# So many rows are worth widening the codes for each tile of them.
FEW_ROWS = 4
# How far ahead of what is multiplied weights are asked for.
PREFETCH_BYTES = 4096
# Rows that meet a strip at once: their numbers stay in a core's cache, and so do their totals.
ROWS_AT_ONCE_NUMBERS = 200_000
LEAST_AT_ONCE, MOST_AT_ONCE = 48, 192

NUMBER_BYTES, PAIR_BYTES, TOTAL_BYTES = 2, 4, 4


class GroupedLinear:
    """y = x @ weight.T (+ bias)"""

    __slots__ = ("_bias", "_kernel", "_order", "_strips", "num_inputs", "num_outputs", "weight")

    def __init__(
        self, strips: Strips, weight: Tensor, bias: Tensor | None, input_order: Tensor | None = None
    ) -> None:
        """weight: what `strips` packed. bias: bfloat16. input_order: x is put into this order first."""
        self.num_inputs = strips.num_inputs
        self.num_outputs = len(weight) * strips.layout.num_outputs
        self.weight = weight
        self._strips = strips
        self._bias = bias
        self._order = input_order
        name = "grouped_linear"
        self._kernel = Kernel(name, _text(name, strips.layout, has_bias=bias is not None))

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous bfloat16 [rows, inputs]. Returns [rows, outputs]."""
        num_rows = len(x)
        assert x.is_contiguous()
        assert x.shape[1] == self.num_inputs
        assert x.dtype == torch.bfloat16
        if self._order is not None:
            x = x.index_select(1, self._order)
        out = x.new_empty((num_rows, self.num_outputs))
        self._kernel.run(
            torch.get_num_threads(),
            x.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            num_rows,
            self._rows_at_once(num_rows),
            self.num_inputs,
            self.num_outputs,
            len(self.weight),
            self._strips.num_groups,
            self._strips.num_steps,
        )
        return out

    def _rows_at_once(self, num_rows: int) -> int:
        """As many as fit, in blocks of one size."""
        most = min(max(ROWS_AT_ONCE_NUMBERS // self.num_inputs, LEAST_AT_ONCE), MOST_AT_ONCE)
        num_blocks = max(1, -(-num_rows // most))
        return max(TILE_ROWS, -(-num_rows // (num_blocks * TILE_ROWS)) * TILE_ROWS)


@cache
def _text(name: str, layout: Layout, *, has_bias: bool) -> str:
    return _Writer(Emitter(name, PANEL), layout, has_bias=has_bias).written()


class _Writer:
    """Writes the kernel. A task is a strip and the rows that meet it at once."""

    def __init__(self, emitter: Emitter, layout: Layout, *, has_bias: bool) -> None:
        self._emitter, self._builder = emitter, emitter.builder
        self._layout, self._codes, self._has_bias = layout, layout.codes, has_bias
        self._panels = range(layout.num_panels)
        self._pairs = layout.codes.inputs_per_vector // 2
        arguments = (emitter.argument(index) for index in range(1, 12))
        self._x, self._weight, self._out, self._bias, self._rows, self._at_once, *sizes = arguments
        inputs, outputs, self._num_strips, self._num_groups, self._num_steps = sizes
        self._row_bytes, self._out_row_bytes = (self._times(size, NUMBER_BYTES) for size in (inputs, outputs))
        self._group_row_bytes = self._times(self._num_steps, self._pairs * PAIR_BYTES)
        self._group_bytes = emitter.offset(
            emitter.integer(layout.codes_offset), (self._num_steps, layout.step_bytes)
        )
        self._widened = emitter.local(MOST_GROUP_INPUTS * layout.num_outputs // 2)
        self._totals = emitter.local(MOST_AT_ONCE * layout.num_outputs)

    def written(self) -> str:
        emitter, builder = self._emitter, self._builder
        blocks = builder.sdiv(
            builder.add(self._rows, builder.sub(self._at_once, emitter.integer(1))), self._at_once
        )
        count = builder.mul(blocks, self._num_strips)
        with emitter.tasks(emitter.argument_address(0), count) as task:
            strip = builder.srem(task, self._num_strips)
            first = builder.mul(builder.sdiv(task, self._num_strips), self._at_once)
            left = builder.sub(self._rows, first)
            num_rows = emitter.smaller_integer(self._at_once, left)
            x = builder.add(self._x, builder.mul(first, self._row_bytes))
            columns = self._times(strip, self._layout.num_outputs * NUMBER_BYTES)
            self._begin(num_rows, columns)
            with emitter.loop(self._num_groups) as index:
                number = builder.add(builder.mul(strip, self._num_groups), index)
                group = builder.add(self._weight, builder.mul(number, self._group_bytes))
                group_x = builder.add(x, builder.mul(index, self._group_row_bytes))
                self._add_group(num_rows, group_x, group)
            out = builder.add(self._out, builder.mul(first, self._out_row_bytes))
            self._end(num_rows, builder.add(out, columns))
        return emitter.finish()

    def _begin(self, num_rows: ir.Value, columns: ir.Value) -> None:
        """Totals are zero or the bias."""
        emitter = self._emitter
        with emitter.loop(num_rows) as row:
            for panel in self._panels:
                begin = (
                    emitter.load(self._builder.add(self._bias, columns), panel * PANEL, BFLOAT16)
                    if self._has_bias
                    else emitter.splat(0.0)
                )
                emitter.store(begin, self._totals_of(row), panel * PANEL, FLOAT32)

    def _end(self, num_rows: ir.Value, out: ir.Value) -> None:
        emitter = self._emitter
        with emitter.loop(num_rows) as row:
            place = self._builder.add(out, self._builder.mul(row, self._out_row_bytes))
            for panel in self._panels:
                total = emitter.load(self._totals_of(row), panel * PANEL, FLOAT32)
                emitter.store(total, place, panel * PANEL, BFLOAT16)

    def _add_group(self, num_rows: ir.Value, x: ir.Value, group: ir.Value) -> None:
        """One group's products, to the totals of all rows."""
        emitter, builder = self._emitter, self._builder
        zero = emitter.integer(0)
        with builder.if_else(builder.icmp_signed("<=", num_rows, emitter.integer(FEW_ROWS))) as (few, many):
            with few:
                for count in range(1, FEW_ROWS + 1):
                    with builder.if_then(builder.icmp_signed("==", num_rows, emitter.integer(count))):
                        self._tile(zero, count, x, group, self._widener(group))
            with many:
                self._widen(group)
                left = builder.srem(num_rows, emitter.integer(TILE_ROWS))
                last = builder.sub(num_rows, left)
                with emitter.loop(last, step=TILE_ROWS) as row:
                    self._tile(row, TILE_ROWS, x, group, self._load_widened)
                for count in range(1, TILE_ROWS):
                    with builder.if_then(builder.icmp_signed("==", left, emitter.integer(count))):
                        self._tile(last, count, x, group, self._load_widened)

    def _tile(
        self,
        first: ir.Value,
        count: int,
        x: ir.Value,
        group: ir.Value,
        vectors_of: Callable[[ir.Value], list[list[ir.Value]]],
    ) -> None:
        """`count` rows. vectors_of: gives for one step of the group each pair's vectors, one of each panel."""
        emitter, builder = self._emitter, self._builder
        rows = [builder.add(first, emitter.integer(row)) for row in range(count)]
        own_x = [builder.add(x, builder.mul(row, self._row_bytes)) for row in rows]
        sums = [
            [emitter.variable(emitter.splat(0.0)) for _ in self._panels] for _ in range(count)
        ]
        with emitter.loop(self._num_steps) as step:
            for pair, vectors in enumerate(vectors_of(step)):
                for row_x, row_sums in zip(own_x, sums, strict=True):
                    place = emitter.offset(
                        row_x, (step, self._pairs * PAIR_BYTES), (emitter.integer(pair), PAIR_BYTES)
                    )
                    numbers = emitter.load_pair(place)
                    for vector, total in zip(vectors, row_sums, strict=True):
                        total.set(emitter.add_products_of_pairs(total.get(), vector, numbers))
        scales = [emitter.load(group, panel * PANEL, self._layout.scales) for panel in self._panels]
        for row, row_sums in zip(rows, sums, strict=True):
            totals = self._totals_of(row)
            for panel, (one, scale) in enumerate(zip(row_sums, scales, strict=True)):
                total = emitter.load(totals, panel * PANEL, FLOAT32)
                total = emitter.multiply_add(one.get(), scale, total)
                emitter.store(total, totals, panel * PANEL, FLOAT32)

    def _widener(self, group: ir.Value) -> Callable[[ir.Value], list[list[ir.Value]]]:
        """Gives a step's codes widened, and asks for those further on."""
        emitter = self._emitter
        zeros = [
            zero_words(emitter, emitter.offset(group, (emitter.integer(self._layout.zeros_offset + panel * PANEL), 1)))
            if self._codes.has_zeros
            else None
            for panel in self._panels
        ]
        codes = emitter.offset(group, (emitter.integer(self._layout.codes_offset), 1))

        def vectors_of(step: ir.Value) -> list[list[ir.Value]]:
            place = emitter.offset(codes, (step, self._layout.step_bytes))
            emitter.prefetch(emitter.offset(place, (emitter.integer(PREFETCH_BYTES), 1)), self._layout.step_bytes)
            by_panel = []
            for panel in self._panels:
                loaded = emitter.load_pairs(emitter.offset(place, (emitter.integer(panel * VECTOR_BYTES), 1)))
                by_panel.append(self._codes.widened(emitter, loaded, zeros[panel]))
            return [list(vectors) for vectors in zip(*by_panel, strict=True)]

        return vectors_of

    def _widen(self, group: ir.Value) -> None:
        """All of a group's codes, into memory."""
        emitter = self._emitter
        vectors_of = self._widener(group)
        with emitter.loop(self._num_steps) as step:
            for pair, vectors in enumerate(vectors_of(step)):
                for panel, vector in enumerate(vectors):
                    emitter.store_pairs(vector, self._widened_place(step, pair, panel))

    def _load_widened(self, step: ir.Value) -> list[list[ir.Value]]:
        emitter = self._emitter
        return [
            [
                emitter.load_pairs(self._widened_place(step, pair, panel))
                for panel in self._panels
            ]
            for pair in range(self._pairs)
        ]

    def _widened_place(self, step: ir.Value, pair: int, panel: int) -> ir.Value:
        emitter = self._emitter
        own = emitter.integer((pair * self._layout.num_panels + panel) * VECTOR_BYTES)
        return emitter.offset(self._widened, (step, self._pairs * self._layout.step_bytes), (own, 1))

    def _totals_of(self, row: ir.Value) -> ir.Value:
        return self._emitter.offset(self._totals, (row, self._layout.num_outputs * TOTAL_BYTES))

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        return self._builder.mul(value, self._emitter.integer(factor))

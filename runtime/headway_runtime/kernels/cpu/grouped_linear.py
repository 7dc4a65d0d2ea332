"""Linear layers of 8- and 4-bit weights with a scale for each output and group of inputs; x stays bfloat16.

A group's products with the codes are summed in float32, pair of inputs by pair, and its sum times the scale
is added to the total of the groups before. So every row's numbers are added in one order, whatever other rows
there are and however the work is shared out.

A tile of a few rows times a strip is summed in registers, and codes are widened in registers while the strip
streams by. Where rows are more, the first tile leaves the widened codes of a group in memory, which stays in
the nearest cache, for the other tiles: the tables' instructions are done beside the first tile's products, by
parts of the processor that do not multiply. The second tile asks for the codes of the next group, into the
second cache: else memory would rest while tiles multiply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.codes import VECTOR_BYTES, Codes, NibbleCodes, zero_words
from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.elements import BFLOAT16, FLOAT32
from headway_runtime.kernels.cpu.emitter import Emitter
from headway_runtime.kernels.cpu.strips import MOST_GROUP_INPUTS, PANEL, Layout, Strips

# A tile: as many sums as registers hold beside a pair of each row and panel.
TILE_ROWS = 6
# The same while codes are widened, which needs registers too.
FIRST_ROWS = 4
# Tiles of what is left over, in turn.
REST_ROWS = (4, 2, 1)
KEPT_PAIRS = 2
# How far ahead of what is multiplied weights are asked for.
PREFETCH_BYTES = 4096
# Rows that meet a strip at once: their numbers stay in a core's cache, and so do their totals.
ROWS_AT_ONCE_NUMBERS = 300_000
LEAST_AT_ONCE, MOST_AT_ONCE = 48, 288

NUMBER_BYTES, PAIR_BYTES, TOTAL_BYTES = 2, 4, 4


class GroupedLinear:
    """y = x @ weight.T (+ bias)"""

    __slots__ = ("_bias", "_kernel", "_order", "_strips", "num_inputs", "num_outputs", "weight")

    def __init__(
        self, codes: Codes, strips: Strips, weight: Tensor, bias: Tensor | None, input_order: Tensor | None
    ) -> None:
        """weight: what `strips` packed. bias: bfloat16. input_order: x is put into this order first."""
        self.num_inputs = strips.num_inputs
        self.num_outputs = len(weight) * strips.layout.num_outputs
        self.weight = weight
        self._strips = strips
        self._bias = bias
        self._order = input_order
        name = "grouped_linear"
        self._kernel = Kernel(name, _text(name, codes, strips.layout, has_bias=bias is not None))

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous bfloat16 [rows, inputs]. Returns [rows, outputs]."""
        num_rows = len(x)
        assert x.dtype == torch.bfloat16
        if self._order is not None:
            x = x.index_select(1, self._order)
        assert x.is_contiguous()
        assert x.shape[1] == self.num_inputs
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
            torch.get_num_threads(),
        )
        return out

    def _rows_at_once(self, num_rows: int) -> int:
        """As many as fit, in blocks of one size."""
        most = min(max(ROWS_AT_ONCE_NUMBERS // self.num_inputs, LEAST_AT_ONCE), MOST_AT_ONCE)
        num_blocks = max(1, -(-num_rows // most))
        return max(TILE_ROWS, -(-num_rows // (num_blocks * TILE_ROWS)) * TILE_ROWS)


@cache
def _text(name: str, codes: Codes, layout: Layout, *, has_bias: bool) -> str:
    return _Writer(Emitter(name, PANEL), codes, layout, has_bias=has_bias).written()


@dataclass(frozen=True, slots=True)
class _Vectors:
    """Where a tile gets weights. load: of so many pairs of inputs from one on, a vector for each panel."""

    num_pairs: int
    load: Callable[[ir.Value], list[list[ir.Value]]]


class _Writer:
    """Writes the kernel. A task is a strip and the rows that meet it at once."""

    def __init__(self, emitter: Emitter, codes: Codes, layout: Layout, *, has_bias: bool) -> None:
        self._emitter, self._builder = emitter, emitter.builder
        self._layout, self._codes, self._has_bias = layout, codes, has_bias
        self._panels = range(layout.num_panels)
        self._pairs = codes.inputs_per_vector // 2
        arguments = (emitter.argument(index) for index in range(1, 13))
        self._x, self._weight, self._out, self._bias, self._rows, self._at_once, *sizes = arguments
        inputs, outputs, self._num_strips, self._num_groups, self._num_steps, num_threads = sizes
        self._row_bytes, self._out_row_bytes = (self._times(size, NUMBER_BYTES) for size in (inputs, outputs))
        self._num_pairs = self._times(self._num_steps, self._pairs)
        self._group_row_bytes = self._times(self._num_pairs, PAIR_BYTES)
        self._group_bytes = emitter.offset(
            emitter.integer(layout.codes_offset), (self._num_steps, layout.step_bytes)
        )
        # From a strip's end to where this thread will go on, as likely as not.
        others = self._builder.sub(num_threads, emitter.integer(1))
        strip_bytes = self._builder.mul(self._num_groups, self._group_bytes)
        self._bytes_to_next = self._builder.mul(others, strip_bytes)
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
                self._add_group(num_rows, group_x, group, self._following(group, index))
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

    def _following(self, group: ir.Value, index: ir.Value) -> ir.Value:
        """The group that comes next; past a strip's end, the first of the strip that this thread may have."""
        builder = self._builder
        after = builder.add(index, self._emitter.integer(1))
        is_last = builder.icmp_signed("==", after, self._num_groups)
        further = builder.select(is_last, self._bytes_to_next, self._emitter.integer(0))
        return builder.add(builder.add(group, self._group_bytes), further)

    def _add_group(self, num_rows: ir.Value, x: ir.Value, group: ir.Value, following: ir.Value) -> None:
        """One group's products, to the totals of all rows."""
        emitter, builder = self._emitter, self._builder
        zero = emitter.integer(0)
        # The tables of 4-bit codes take but one register.
        most = TILE_ROWS if isinstance(self._codes, NibbleCodes) else FIRST_ROWS
        with builder.if_else(builder.icmp_signed("<=", num_rows, emitter.integer(most))) as (few, many):
            with few:
                for count in range(1, most + 1):
                    with builder.if_then(builder.icmp_signed("==", num_rows, emitter.integer(count))):
                        self._tile(zero, count, x, group, self._widener(group))
            with many:
                self._tile(zero, FIRST_ROWS, x, group, self._widener(group, keeps=True))
                rest = builder.sub(num_rows, emitter.integer(FIRST_ROWS))
                left = builder.srem(rest, emitter.integer(TILE_ROWS))
                last = builder.sub(num_rows, left)
                with emitter.loop(last, start=FIRST_ROWS, step=TILE_ROWS) as row:
                    self._tile(row, TILE_ROWS, x, group, self._kept(row, following))
                for count in REST_ROWS:
                    has_them = builder.and_(left, emitter.integer(count))
                    with builder.if_then(builder.icmp_signed("!=", has_them, zero)):
                        before = builder.and_(left, emitter.integer(-2 * count))
                        row = builder.add(last, before)
                        self._tile(row, count, x, group, self._kept(row, following))

    def _tile(self, first: ir.Value, count: int, x: ir.Value, group: ir.Value, vectors: "_Vectors") -> None:
        """`count` rows."""
        emitter, builder = self._emitter, self._builder
        rows = [builder.add(first, emitter.integer(row)) for row in range(count)]
        own_x = [builder.add(x, builder.mul(row, self._row_bytes)) for row in rows]
        sums = [[emitter.variable(emitter.splat(0.0)) for _ in self._panels] for _ in range(count)]
        with emitter.loop(self._num_pairs, step=vectors.num_pairs) as at:
            for index, of_panels in enumerate(vectors.load(at)):
                for row_x, row_sums in zip(own_x, sums, strict=True):
                    place = emitter.offset(row_x, (at, PAIR_BYTES), (emitter.integer(index), PAIR_BYTES))
                    numbers = emitter.load_pair(place)
                    for vector, total in zip(of_panels, row_sums, strict=True):
                        total.set(emitter.add_products_of_pairs(total.get(), vector, numbers))
        scales = [emitter.load(group, panel * PANEL, self._layout.scales) for panel in self._panels]
        for row, row_sums in zip(rows, sums, strict=True):
            totals = self._totals_of(row)
            for panel, (one, scale) in enumerate(zip(row_sums, scales, strict=True)):
                total = emitter.load(totals, panel * PANEL, FLOAT32)
                total = emitter.multiply_add(one.get(), scale, total)
                emitter.store(total, totals, panel * PANEL, FLOAT32)

    def _widener(self, group: ir.Value, *, keeps: bool = False) -> "_Vectors":
        """Widens a step's codes, and asks for those further on. keeps: for `_kept`."""
        emitter = self._emitter
        zeros = [
            zero_words(
                emitter,
                emitter.offset(group, (emitter.integer(self._layout.zeros_offset + panel * PANEL), 1)),
            )
            if self._codes.has_zeros
            else None
            for panel in self._panels
        ]
        codes = emitter.offset(group, (emitter.integer(self._layout.codes_offset), 1))

        def load(first: ir.Value) -> list[list[ir.Value]]:
            step = self._builder.sdiv(first, emitter.integer(self._pairs), flags=("exact",))
            place = emitter.offset(codes, (step, self._layout.step_bytes))
            ahead = emitter.offset(place, (emitter.integer(PREFETCH_BYTES), 1))
            emitter.prefetch(ahead, self._layout.step_bytes)
            by_panel = []
            for panel in self._panels:
                loaded = emitter.load_pairs(emitter.offset(place, (emitter.integer(panel * VECTOR_BYTES), 1)))
                by_panel.append(self._codes.widened(emitter, loaded, zeros[panel]))
            by_pair = [list(vectors) for vectors in zip(*by_panel, strict=True)]
            if keeps:
                for pair, vectors in enumerate(by_pair):
                    for panel, vector in enumerate(vectors):
                        emitter.store_pairs(vector, self._kept_place(first, pair, panel))
            return by_pair

        return _Vectors(self._pairs, load)

    def _kept(self, row: ir.Value, following: ir.Value) -> "_Vectors":
        """What was widened before, for a tile from `row` on. Asks for what follows meanwhile."""
        emitter = self._emitter
        # It is enough that one tile asks; the others ask for what is near.
        is_one = self._builder.icmp_signed("<", row, emitter.integer(FIRST_ROWS + TILE_ROWS))
        ahead = self._builder.select(is_one, following, self._widened)
        num_bytes = self._layout.step_bytes // self._pairs

        def load(first: ir.Value) -> list[list[ir.Value]]:
            wanted = emitter.offset(ahead, (first, num_bytes))
            emitter.prefetch(wanted, KEPT_PAIRS * num_bytes, is_near=False)
            return [
                [self._emitter.load_pairs(self._kept_place(first, pair, panel)) for panel in self._panels]
                for pair in range(KEPT_PAIRS)
            ]

        return _Vectors(KEPT_PAIRS, load)

    def _kept_place(self, first: ir.Value, pair: int, panel: int) -> ir.Value:
        own = self._emitter.integer((pair * self._layout.num_panels + panel) * VECTOR_BYTES)
        return self._emitter.offset(self._widened, (first, self._layout.step_bytes), (own, 1))

    def _totals_of(self, row: ir.Value) -> ir.Value:
        return self._emitter.offset(self._totals, (row, self._layout.num_outputs * TOTAL_BYTES))

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        return self._builder.mul(value, self._emitter.integer(factor))

"""Linear layers in bfloat16 whose weights lie in 12 bits each (`lossless_codes.py`).

The first tile of rows widens a group's codes in registers while they stream by; where rows are more, it
leaves the pairs in memory that stays in the nearest cache, for the other tiles, which meanwhile ask for the
next group's codes. A step with patches always goes through memory, where they are put into it. Sums go on
from group to group in float32 and numbers are added in the order of `linear.py`: results are those of the
plain weights there, to the last bit.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.codes import VECTOR_BYTES
from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.elements import BFLOAT16, FLOAT32, I16, I32, I64
from headway_runtime.kernels.cpu.emitter import Emitter, Variable
from headway_runtime.kernels.cpu.lossless_codes import (
    GROUP_INPUTS,
    GROUP_STEPS,
    LONG_BYTES,
    NUMBER_BYTES,
    STEP_BYTES,
    STEP_INPUTS,
    STEP_PAIRS,
    TABLE_BYTES,
    LosslessStrips,
    load_bytes,
    widened,
)
from headway_runtime.kernels.cpu.strips import PANEL

# A tile: as many sums as registers hold beside a pair of each row and panel.
TILE_ROWS = 6
# The same while codes are widened, which needs registers too.
FIRST_ROWS = 4
# First tiles, and from how many rows to how many they serve: where there are too few, the last one is
# computed twice.
FIRST_TILES: dict[int, tuple[int, int | None]] = {1: (1, 1), 2: (2, 2), FIRST_ROWS: (3, None)}
# Tiles of what is left over, in turn.
REST_ROWS = (4, 2, 1)
# How far ahead of what is multiplied weights are asked for.
PREFETCH_STEPS = 8
# Rows that meet a strip at once, four and then whole tiles: their numbers of a group stay in a core's cache.
MOST_AT_ONCE = 286
PAIR_BYTES, TOTAL_BYTES = 4, 4
NAME = "lossless_linear"

Sums = list[list[Variable]]


class LosslessLinear:
    """y = x @ weight.T (+ bias)"""

    __slots__ = ("_bias", "_kernel", "_text", "num_inputs", "num_outputs", "weight")

    def __init__(self, weight: LosslessStrips, bias: Tensor | None) -> None:
        """bias: bfloat16."""
        self.num_inputs, self.num_outputs = weight.num_inputs, weight.num_outputs
        self.weight, self._bias = weight, bias
        self._text = _text_ahead(weight.num_panels, has_bias=bias is not None)
        self._kernel: Kernel | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous bfloat16 [rows, inputs]. Returns [rows, outputs]."""
        num_rows, weight = len(x), self.weight
        assert x.is_contiguous()
        assert x.shape[1] == self.num_inputs
        assert x.dtype == torch.bfloat16
        out = x.new_empty((num_rows, self.num_outputs))
        if self._kernel is None:
            self._kernel = Kernel(NAME, self._text.result())
        self._kernel.run(
            torch.get_num_threads(),
            x.data_ptr(),
            weight.codes.data_ptr(),
            weight.tables.data_ptr(),
            weight.patches.data_ptr(),
            weight.steps.data_ptr(),
            weight.patch_starts.data_ptr(),
            weight.group_starts.data_ptr(),
            out.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            num_rows,
            self._rows_at_once(num_rows),
            self.num_inputs,
            self.num_outputs,
            len(weight.codes),
            torch.get_num_threads(),
        )
        return out

    def _rows_at_once(self, num_rows: int) -> int:
        """As many as fit, in blocks of one size."""
        num_blocks = max(1, -(-num_rows // MOST_AT_ONCE))
        num_tiles = -(-max(0, -(-num_rows // num_blocks) - FIRST_ROWS) // TILE_ROWS)
        return FIRST_ROWS + num_tiles * TILE_ROWS


@dataclass(frozen=True, slots=True)
class _Task:
    """A strip and the rows that meet it at once; where their numbers, codes, outputs and bias begin."""

    strip: ir.Value
    num_rows: ir.Value
    x: ir.Value
    codes: ir.Value
    out: ir.Value
    bias: ir.Value


@cache
def _text_ahead(num_panels: int, *, has_bias: bool) -> Future[str]:
    """Of the kernel, which is compiled on a thread meanwhile: a model's weights are still to be encoded."""

    def compiled() -> str:
        text = _text(NAME, num_panels, has_bias=has_bias)
        Kernel(NAME, text)
        return text

    executor = ThreadPoolExecutor(1, "headway-kernel")
    try:
        return executor.submit(compiled)
    finally:
        executor.shutdown(wait=False)


@cache
def _text(name: str, num_panels: int, *, has_bias: bool) -> str:
    return _Writer(Emitter(name, PANEL), num_panels, has_bias=has_bias).written()


class _Writer:
    """Writes the kernel. A task is a strip and the rows that meet it at once."""

    def __init__(self, emitter: Emitter, num_panels: int, *, has_bias: bool) -> None:
        self._emitter, self._builder, self._has_bias = emitter, emitter.builder, has_bias
        self._panels, self._num_outputs = range(num_panels), num_panels * PANEL
        self._pair_bytes, self._step_bytes = num_panels * VECTOR_BYTES, num_panels * STEP_BYTES
        arguments = (emitter.argument(index) for index in range(1, 16))
        self._x, self._codes, self._tables, self._patches, self._steps, *others = arguments
        self._patch_starts, self._group_starts, self._out, self._bias, self._rows, *sizes = others
        self._at_once, inputs, outputs, self._num_strips, num_threads = sizes
        self._row_bytes, self._out_row_bytes = (self._times(size, NUMBER_BYTES) for size in (inputs, outputs))
        self._num_steps = self._builder.sdiv(inputs, emitter.integer(STEP_INPUTS))
        self._num_groups = self._quotient_up(inputs, emitter.integer(GROUP_INPUTS))
        self._strip_bytes = self._times(self._num_steps, self._step_bytes)
        # From a strip's end to where this thread will go on, as likely as not.
        others = self._builder.sub(num_threads, emitter.integer(1))
        self._bytes_to_next = self._builder.mul(others, self._strip_bytes)
        self._pairs = emitter.local(GROUP_INPUTS * self._num_outputs // 2)
        self._totals = emitter.local(MOST_AT_ONCE * self._num_outputs)

    def written(self) -> str:
        emitter, builder = self._emitter, self._builder
        blocks = self._quotient_up(self._rows, self._at_once)
        with emitter.tasks(emitter.argument_address(0), builder.mul(blocks, self._num_strips)) as task:
            strip = builder.srem(task, self._num_strips)
            first = builder.mul(builder.sdiv(task, self._num_strips), self._at_once)
            num_rows = emitter.smaller_integer(self._at_once, builder.sub(self._rows, first))
            columns = self._times(strip, self._num_outputs * NUMBER_BYTES)
            out = builder.add(self._out, builder.mul(first, self._out_row_bytes))
            one = _Task(
                strip,
                num_rows,
                builder.add(self._x, builder.mul(first, self._row_bytes)),
                builder.add(self._codes, builder.mul(strip, self._strip_bytes)),
                builder.add(out, columns),
                builder.add(self._bias, columns),
            )
            with emitter.loop(self._num_groups) as group:
                self._add_group(one, group)
        return emitter.finish()

    def _add_group(self, task: _Task, group: ir.Value) -> None:
        """One group's products, to the sums of all rows."""
        emitter, builder, num_rows = self._emitter, self._builder, task.num_rows
        for count, (least, most) in FIRST_TILES.items():
            is_it = builder.icmp_signed(">=", num_rows, emitter.integer(least))
            if most is not None:
                is_no_more = builder.icmp_signed("<=", num_rows, emitter.integer(most))
                is_it = builder.and_(is_it, is_no_more)
            with builder.if_then(is_it):
                self._widening_tile(task, count, group)
        rest = emitter.larger_integer(builder.sub(num_rows, emitter.integer(FIRST_ROWS)), emitter.integer(0))
        left = builder.srem(rest, emitter.integer(TILE_ROWS))
        last = builder.sub(num_rows, left)
        with emitter.loop(last, start=FIRST_ROWS, step=TILE_ROWS) as row:
            self._tile(task, row, TILE_ROWS, group)
        for count in REST_ROWS:
            has_them = builder.and_(left, emitter.integer(count))
            with builder.if_then(builder.icmp_signed("!=", has_them, emitter.integer(0))):
                before = builder.and_(left, emitter.integer(-2 * count))
                self._tile(task, builder.add(last, before), count, group)

    def _tile(self, task: _Task, first: ir.Value, count: int, group: ir.Value) -> None:
        """`count` rows times a group of which the first tile left the pairs."""
        emitter, builder = self._emitter, self._builder
        rows = [builder.add(first, emitter.integer(row)) for row in range(count)]
        x = emitter.offset(task.x, (group, GROUP_INPUTS * NUMBER_BYTES))
        own_x = [builder.add(x, builder.mul(row, self._row_bytes)) for row in rows]
        sums = self._begun(task, rows, group)
        start = self._times(group, GROUP_STEPS)
        next_start = builder.add(start, emitter.integer(GROUP_STEPS))
        num_steps = builder.sub(emitter.smaller_integer(next_start, self._num_steps), start)
        # It is enough that one tile asks; the others ask for what is near.
        is_one = builder.icmp_signed("<", first, emitter.integer(FIRST_ROWS + TILE_ROWS))
        ahead = builder.select(is_one, self._code_place(task, next_start), self._pairs)
        with emitter.loop(self._times(num_steps, STEP_PAIRS)) as pair:
            # Of a step's codes, a part with each of its pairs.
            num_bytes = self._step_bytes // STEP_PAIRS
            emitter.prefetch(emitter.offset(ahead, (pair, num_bytes)), num_bytes, is_near=False)
            self._add_products(sums, own_x, self._kept(self._pairs, pair), pair)
        self._end(sums, task, rows, group)

    def _widening_tile(self, task: _Task, count: int, group: ir.Value) -> None:
        """The first `count` rows times one group. More than one row leave its pairs."""
        emitter, builder = self._emitter, self._builder
        last_row = builder.sub(task.num_rows, emitter.integer(1))
        rows = [emitter.smaller_integer(emitter.integer(row), last_row) for row in range(count)]
        own_x = [builder.add(task.x, builder.mul(row, self._row_bytes)) for row in rows]
        sums = self._begun(task, rows, group)
        table = load_bytes(emitter, emitter.offset(self._tables, (task.strip, TABLE_BYTES)))
        first = self._times(group, GROUP_STEPS)
        last = emitter.smaller_integer(builder.add(first, emitter.integer(GROUP_STEPS)), self._num_steps)
        number = builder.add(builder.mul(task.strip, self._num_groups), group)
        start, end = self._between(self._group_starts, number)
        # What no other tile wants takes no more than a step's room in the cache.
        has_others = builder.icmp_signed(">", task.num_rows, emitter.integer(count))
        stride = builder.select(
            has_others, emitter.integer(STEP_PAIRS * self._pair_bytes), emitter.integer(0)
        )
        current = emitter.variable(first)
        # Steps without patches, then one that has some, and so on.
        with emitter.loop(builder.add(end, emitter.integer(1)), start=start) as patched:
            is_last = builder.icmp_signed("==", patched, end)
            stop = builder.select(is_last, last, self._long(self._steps, patched))
            with emitter.loop(stop, start=current.get()) as step:
                place = builder.add(self._pairs, builder.mul(builder.sub(step, first), stride))
                for index, vectors in enumerate(self._widened(task, step, table)):
                    if count > 1:
                        self._keep(vectors, place, index)
                    pair = emitter.offset(emitter.integer(index), (step, STEP_PAIRS))
                    self._add_products(sums, own_x, vectors, pair)
            with builder.if_then(builder.not_(is_last)):
                place = builder.add(self._pairs, builder.mul(builder.sub(stop, first), stride))
                for index, vectors in enumerate(self._widened(task, stop, table)):
                    self._keep(vectors, place, index)
                self._patch(patched, place)
                for index in range(STEP_PAIRS):
                    vectors = self._kept(place, emitter.integer(index))
                    pair = emitter.offset(emitter.integer(index), (stop, STEP_PAIRS))
                    self._add_products(sums, own_x, vectors, pair)
            current.set(builder.add(stop, emitter.integer(1)))
        self._end(sums, task, rows, group)

    def _patch(self, patched: ir.Value, place: ir.Value) -> None:
        """Put its patches into a step's pairs. patched: its number among the steps that have some."""
        emitter, builder = self._emitter, self._builder
        start, end = self._between(self._patch_starts, patched)
        with emitter.loop(end, start=start) as index:
            patch = self._long(self._patches, index)
            number = emitter.offset(place, (builder.lshr(patch, emitter.integer(16)), NUMBER_BYTES))
            builder.store(builder.trunc(patch, I16), builder.inttoptr(number, I16.as_pointer()))

    def _widened(self, task: _Task, step: ir.Value, table: ir.Value) -> list[list[ir.Value]]:
        """A step's pairs, a vector for each panel. Asks for the codes further on, too."""
        emitter = self._emitter
        ahead = self._builder.add(step, emitter.integer(PREFETCH_STEPS))
        emitter.prefetch(self._code_place(task, ahead), self._step_bytes)
        place = emitter.offset(task.codes, (step, self._step_bytes))
        by_panel = [
            widened(emitter, emitter.offset(place, (emitter.integer(panel), STEP_BYTES)), table)
            for panel in self._panels
        ]
        return [list(vectors) for vectors in zip(*by_panel, strict=True)]

    def _code_place(self, task: _Task, step: ir.Value) -> ir.Value:
        """Where a step's codes lie; past a strip's end, those of the strip that this thread may have next."""
        emitter, builder = self._emitter, self._builder
        is_own = builder.icmp_signed("<", step, self._num_steps)
        further = builder.select(is_own, emitter.integer(0), self._bytes_to_next)
        return builder.add(emitter.offset(task.codes, (step, self._step_bytes)), further)

    def _keep(self, vectors: list[ir.Value], place: ir.Value, pair: int) -> None:
        for panel, vector in enumerate(vectors):
            own = self._emitter.integer(pair * self._pair_bytes + panel * VECTOR_BYTES)
            self._emitter.store_pairs(vector, self._emitter.offset(place, (own, 1)))

    def _kept(self, place: ir.Value, pair: ir.Value) -> list[ir.Value]:
        """What was left there."""
        emitter = self._emitter
        own = emitter.offset(place, (pair, self._pair_bytes))
        return [
            emitter.load_pairs(emitter.offset(own, (emitter.integer(panel), VECTOR_BYTES)))
            for panel in self._panels
        ]

    def _add_products(
        self, sums: Sums, own_x: list[ir.Value], vectors: list[ir.Value], pair: ir.Value
    ) -> None:
        """pair: of the rows' numbers."""
        emitter = self._emitter
        for row_x, row_sums in zip(own_x, sums, strict=True):
            numbers = emitter.load_pair(emitter.offset(row_x, (pair, PAIR_BYTES)))
            for vector, total in zip(vectors, row_sums, strict=True):
                total.set(emitter.add_products_of_pairs(total.get(), vector, numbers))

    def _begun(self, task: _Task, rows: list[ir.Value], group: ir.Value) -> Sums:
        """Sums of the groups before: zero or the bias before the first."""
        emitter, builder = self._emitter, self._builder
        sums = [[emitter.variable(emitter.splat(0.0)) for _ in self._panels] for _ in rows]
        is_first = builder.icmp_signed("==", group, emitter.integer(0))
        with builder.if_else(is_first) as (before, later):
            with before:
                for panel in self._panels if self._has_bias else ():
                    bias = emitter.load(task.bias, panel * PANEL, BFLOAT16)
                    for row_sums in sums:
                        row_sums[panel].set(bias)
            with later:
                for row, row_sums in zip(rows, sums, strict=True):
                    for panel, total in enumerate(row_sums):
                        total.set(emitter.load(self._totals_of(row), panel * PANEL, FLOAT32))
        return sums

    def _end(self, sums: Sums, task: _Task, rows: list[ir.Value], group: ir.Value) -> None:
        """Sums of this group and those before, which are outputs after the last."""
        emitter, builder = self._emitter, self._builder
        num_groups = builder.add(group, emitter.integer(1))
        with builder.if_else(builder.icmp_signed("==", num_groups, self._num_groups)) as (after, earlier):
            with after:
                for row, row_sums in zip(rows, sums, strict=True):
                    place = builder.add(task.out, builder.mul(row, self._out_row_bytes))
                    for panel, total in enumerate(row_sums):
                        emitter.store(total.get(), place, panel * PANEL, BFLOAT16)
            with earlier:
                for row, row_sums in zip(rows, sums, strict=True):
                    for panel, total in enumerate(row_sums):
                        emitter.store(total.get(), self._totals_of(row), panel * PANEL, FLOAT32)

    def _totals_of(self, row: ir.Value) -> ir.Value:
        return self._emitter.offset(self._totals, (row, self._num_outputs * TOTAL_BYTES))

    def _between(self, starts: ir.Value, index: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Where something begins, and where the next one does."""
        return self._long(starts, index), self._long(
            starts, self._builder.add(index, self._emitter.integer(1))
        )

    def _long(self, address: ir.Value, index: ir.Value) -> ir.Value:
        """A number of 32 bits, which is not negative."""
        place = self._emitter.offset(address, (index, LONG_BYTES))
        loaded = self._builder.load(self._builder.inttoptr(place, I32.as_pointer()))
        return self._builder.zext(loaded, I64)

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        return self._builder.mul(value, self._emitter.integer(factor))

    def _quotient_up(self, value: ir.Value, divisor: ir.Value) -> ir.Value:
        more = self._builder.sub(divisor, self._emitter.integer(1))
        return self._builder.sdiv(self._builder.add(value, more), divisor)

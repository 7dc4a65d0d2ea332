"""What adapters add to a product: for tiles of a few rows of one adapter, x @ A.T, and of that @ B.T.

Two kernels, one after the other: the products with A, a few of its rows at a time, whose sums stay in
float32; then, a strip of outputs at a time, what each part's B adds to them. A task is a tile, or, where
there are fewer than threads, a chunk of its rows of A and of its strips. So each adapter's weights are read
once for up to four rows, and two calls serve all adapters, however many there are. A lies as it is; B in
strips of outputs, one input after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.adapters.adapter_rows import TILE_NUMBERS, TILE_ROWS
from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import FLOAT32, Elements
from headway_runtime.kernels.cpu.emitter import Emitter

# Rows of A that are met at once; ranks are filled up with zeros to a multiple.
RANKS_AT_ONCE = 4
MOST_VECTORS = 4
# Of a slot in the table: the address of A and the number of its rows; then of each part these:
SLOT_NUMBERS = 2
# the address of B, its rank, and where that begins in A.
PART_NUMBERS = 3
# Below so many numbers of weights and rows, threads cost more than they save.
LEAST_NUMBERS = 1 << 15
# So many tasks for each thread, where tiles are fewer.
TASKS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """One adapter's weights of one product. a: [ranks, inputs]; bs: of each part, or None. ranks: of each."""

    a: Tensor
    bs: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + sum(b.nbytes for b in self.bs if b is not None)


class AdapterProducts:
    """The kernels for one merged product, and the table of the adapters that it has weights of."""

    __slots__ = (
        "_dtype",
        "_most",
        "_num_inputs",
        "_num_outputs",
        "_parts",
        "_sizes",
        "_slots",
        "_strip",
        "_table",
        "_times_a",
        "_times_b",
    )

    def __init__(
        self, num_inputs: int, sizes: Sequence[int], num_slots: int, dtype: torch.dtype, width: int
    ) -> None:
        """sizes: outputs of each part; `width` divides them and num_inputs."""
        self._num_inputs, self._num_outputs = num_inputs, sum(sizes)
        self._sizes = tuple(sizes)
        self._dtype = dtype
        vectors = next(count for count in (MOST_VECTORS, 2, 1) if math.gcd(*sizes) % (count * width) == 0)
        self._strip = vectors * width
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._parts = torch.tensor(
            [[first, size // self._strip] for first, size in zip(firsts, sizes, strict=True)]
        )
        self._table = torch.zeros(
            (num_slots + 1, SLOT_NUMBERS + PART_NUMBERS * len(sizes)), dtype=torch.int64
        )
        self._slots: dict[int, PackedDelta] = {}
        # The most rows that any of them has in A.
        self._most = 0
        stored = elements(dtype)
        self._times_a = Kernel("adapter_times_a", _times_a_text("adapter_times_a", stored, width))
        self._times_b = Kernel("adapter_times_b", _times_b_text("adapter_times_b", stored, width, vectors))

    def packed(self, matrices: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        """matrices: A [rank, inputs] and B [outputs, rank] of each part."""
        rows: list[Tensor] = []
        bs: list[Tensor | None] = []
        ranks = []
        for pair in matrices:
            if pair is None:
                bs.append(None)
                ranks.append(0)
                continue
            a, b = pair
            missing = -len(a) % RANKS_AT_ONCE
            rows.append(torch.nn.functional.pad(a, (0, 0, 0, missing)))
            rank = len(a) + missing
            strips = torch.nn.functional.pad(b, (0, missing)).view(-1, self._strip, rank)
            bs.append(strips.transpose(1, 2).to(self._dtype).contiguous())
            ranks.append(rank)
        return PackedDelta(torch.cat(rows).to(self._dtype).contiguous(), tuple(bs), tuple(ranks))

    def num_bytes(self, rank: int) -> int:
        """What weights of that rank take that change all parts."""
        numbers = len(self._sizes) * self._num_inputs + self._num_outputs
        return -(-rank // RANKS_AT_ONCE) * RANKS_AT_ONCE * numbers * self._dtype.itemsize

    def put(self, slot: int, delta: PackedDelta | None) -> None:
        """Use it for the slot from the next call on; None: nothing."""
        self._table[slot] = 0
        self._slots.pop(slot, None)
        if delta is not None:
            self._slots[slot] = delta
        self._most = max((len(one.a) for one in self._slots.values()), default=0)
        if delta is None:
            return
        numbers, first = [delta.a.data_ptr(), len(delta.a)], 0
        for b, rank in zip(delta.bs, delta.ranks, strict=True):
            numbers += [0 if b is None else b.data_ptr(), rank, first]
            first += rank
        self._table[slot] = torch.tensor(numbers)

    def __call__(self, out: Tensor, x: Tensor, tiles: Tensor) -> None:
        """Add to `out`. x: [rows, inputs]; out: [rows, outputs]; both contiguous, of the kernel's dtype."""
        assert x.is_contiguous()
        assert out.is_contiguous()
        assert x.dtype == out.dtype == self._dtype
        assert x.shape[1] == self._num_inputs
        assert out.shape[1] == self._num_outputs
        most, num_tiles = self._most, len(tiles)
        if not most:
            return
        scratch = torch.empty(num_tiles * TILE_ROWS * most, dtype=torch.float32)
        work = num_tiles * most * (self._num_inputs + self._num_outputs)
        most_threads = 1 if work < LEAST_NUMBERS else torch.get_num_threads()
        num_chunks = -(-TASKS_PER_THREAD * most_threads // num_tiles) if num_tiles < most_threads else 1
        # Waking threads twice for a lone tile costs more than it brings; those of a tape are awake.
        num_threads = 1 if num_tiles == 1 else most_threads
        shared = (
            *(num_tiles * num_chunks, num_chunks, tiles.data_ptr()),
            *(self._table.data_ptr(), self._table.shape[1] * 8, scratch.data_ptr(), most),
        )
        self._times_a.run(num_threads, *shared, x.data_ptr(), self._num_inputs)
        parts = (len(self._sizes), self._parts.data_ptr())
        self._times_b.run(num_threads, *shared, out.data_ptr(), self._num_outputs, *parts)


@dataclass(frozen=True, slots=True)
class _Task:
    """Of one task: the rows of x or out, those of the scratch memory, the adapter's slot, and which chunk."""

    rows: list[ir.Value]
    middles: list[ir.Value]
    slot: ir.Value
    chunk: ir.Value
    num_chunks: ir.Value

    def span(self, emitter: Emitter, count: ir.Value, step: int = 1) -> tuple[ir.Value, ir.Value]:
        """Where this chunk of `count` things begins and ends; both multiples of step, or the end of all."""
        builder, integer = emitter.builder, emitter.integer
        at_once = builder.mul(self.num_chunks, integer(step))
        rounded = builder.sub(builder.add(count, at_once), integer(1))
        size = builder.mul(builder.sdiv(rounded, at_once), integer(step))
        start = emitter.smaller_integer(builder.mul(self.chunk, size), count)
        return start, emitter.smaller_integer(builder.add(start, size), count)


def _of_each_task(emitter: Emitter, stored: Elements, body: Callable[[_Task], None]) -> None:
    """body: makes the code for a task, once for each number of rows that a tile may have."""
    builder, integer = emitter.builder, emitter.integer
    num_tasks, num_chunks, tiles, table, slot_bytes, scratch, most, numbers, row_size = (
        emitter.argument(index) for index in range(1, 10)
    )
    row_bytes = builder.mul(row_size, integer(stored.num_bytes))
    middle_row_bytes = builder.mul(most, integer(FLOAT32.num_bytes))
    with emitter.tasks(emitter.argument_address(0), num_tasks) as task:
        place, chunk = builder.sdiv(task, num_chunks), builder.srem(task, num_chunks)
        tile = emitter.offset(tiles, (place, TILE_NUMBERS * 8))
        slot_number, count = (emitter.load_integer(tile, integer(index)) for index in range(2))
        slot = builder.add(table, builder.mul(slot_number, slot_bytes))
        own_middle = builder.add(
            scratch, builder.mul(builder.mul(place, integer(TILE_ROWS)), middle_row_bytes)
        )
        for number in range(1, TILE_ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", count, integer(number))):
                places = [emitter.load_integer(tile, integer(2 + row)) for row in range(number)]
                rows = [builder.add(numbers, builder.mul(one, row_bytes)) for one in places]
                middles = [
                    builder.add(own_middle, builder.mul(integer(row), middle_row_bytes))
                    for row in range(number)
                ]
                body(_Task(rows, middles, slot, chunk, num_chunks))


@cache
def _times_a_text(name: str, stored: Elements, width: int) -> str:
    emitter = Emitter(name, width)
    builder, integer = emitter.builder, emitter.integer
    inputs = emitter.argument(9)
    row_bytes = builder.mul(inputs, integer(stored.num_bytes))

    def times_a(task: _Task) -> None:
        a, num_ranks = (emitter.load_integer(task.slot, integer(index)) for index in range(SLOT_NUMBERS))
        start, end = task.span(emitter, num_ranks, RANKS_AT_ONCE)
        with emitter.loop(end, start=start, step=RANKS_AT_ONCE) as rank:
            weights = [
                builder.add(a, builder.mul(builder.add(rank, integer(one)), row_bytes))
                for one in range(RANKS_AT_ONCE)
            ]
            sums = [[emitter.variable(emitter.splat(0.0)) for _ in weights] for _ in task.rows]
            with emitter.loop(inputs, step=width) as at:
                loaded = [emitter.load(weight, at, stored) for weight in weights]
                for row, row_sums in zip(task.rows, sums, strict=True):
                    numbers = emitter.load(row, at, stored)
                    for weight, total in zip(loaded, row_sums, strict=True):
                        total.set(emitter.multiply_add(numbers, weight, total.get()))
            for middle, row_sums in zip(task.middles, sums, strict=True):
                place = emitter.offset(middle, (rank, FLOAT32.num_bytes))
                for one, total in enumerate(row_sums):
                    target = emitter.offset(place, (integer(one), FLOAT32.num_bytes))
                    emitter.store_number(emitter.sum_of_lanes(total.get()), target)

    _of_each_task(emitter, stored, times_a)
    return emitter.finish()


@cache
def _times_b_text(name: str, stored: Elements, width: int, vectors: int) -> str:
    emitter = Emitter(name, width)
    builder, integer = emitter.builder, emitter.integer
    num_parts, parts = (emitter.argument(index) for index in (10, 11))
    strip_bytes = vectors * width * stored.num_bytes

    def add_times_b(task: _Task) -> None:
        with emitter.loop(num_parts) as part:
            own = emitter.offset(task.slot, (integer(SLOT_NUMBERS), 8), (part, PART_NUMBERS * 8))
            b, rank, first_rank = (emitter.load_integer(own, integer(index)) for index in range(PART_NUMBERS))
            place = emitter.offset(parts, (part, 2 * 8))
            first_output, num_strips = (emitter.load_integer(place, integer(index)) for index in range(2))
            has_any = builder.icmp_signed(">", rank, integer(0))
            start, end = task.span(emitter, builder.select(has_any, num_strips, integer(0)))
            with emitter.loop(end, start=start) as strip:
                column = builder.add(first_output, builder.mul(strip, integer(vectors * width)))
                weights = builder.add(b, builder.mul(strip, builder.mul(rank, integer(strip_bytes))))
                places = [emitter.offset(target, (column, stored.num_bytes)) for target in task.rows]
                sums = [
                    [emitter.variable(emitter.load(one, index * width, stored)) for index in range(vectors)]
                    for one in places
                ]
                with emitter.loop(rank) as at:
                    row_of_b = emitter.offset(weights, (at, strip_bytes))
                    loaded = [emitter.load(row_of_b, index * width, stored) for index in range(vectors)]
                    for middle, row_sums in zip(task.middles, sums, strict=True):
                        number = emitter.load_number(middle, builder.add(first_rank, at))
                        for weight, total in zip(loaded, row_sums, strict=True):
                            total.set(emitter.multiply_add(number, weight, total.get()))
                for one, row_sums in zip(places, sums, strict=True):
                    for index, total in enumerate(row_sums):
                        emitter.store(total.get(), one, index * width, stored)

    _of_each_task(emitter, stored, add_times_b)
    return emitter.finish()

"""Writes the kernels of decode attention: a running maximum and sum per block (arXiv 1805.02867, as in
FlashAttention, arXiv 2205.14135).

A layer with a window begins at the first block that its token sees some of. Codes (see kv_layout.py) are
never turned into what they mean: the scales of keys go to the scores, and those of values to the weights.
"""

from llvmlite import ir

from headway_runtime.kernels.cpu.elements import FLOAT32, Elements
from headway_runtime.kernels.cpu.emitter import LOWEST, Emitter
from headway_runtime.kernels.cpu.kv_layout import SCALE_BYTES, KVLayout
from headway_runtime.kernels.cpu.rotation import emit_rotated
from headway_runtime.kernels.cpu.scoring import Scoring
from headway_runtime.kernels.cpu.softmax import emit_capped

# Vectors of weighted values that are summed at once: as many as AVX-512's registers hold beside what they are
# made of, and half as many where there are fewer or smaller ones.
SUMS_AT_ONCE = {16: 16, 8: 8, 4: 8}


class DecodeWriter:
    """Writes one kernel. A task is one sequence and some of its KV heads, numbers `first` to below `end`."""

    def __init__(
        self,
        name: str,
        layout: KVLayout,
        scoring: Scoring,
        stored: Elements,
        width: int,
        *,
        is_stored: bool,
    ) -> None:
        """stored: numbers of queries and results. is_stored: whether rows are rotated and stored."""
        self._layout, self._shape = layout, layout.shape
        self._scoring = scoring
        self._stored = stored
        self._is_stored = is_stored
        self._emitter = emitter = Emitter(name, width)
        heads, groups, dim = self._shape.num_kv_heads, self._shape.num_groups, self._shape.head_dim
        # Of each query head: itself, the weighted values so far, the largest score and the sum of weights
        # (of each lane), and a block's scores, then weights.
        self._queries, self._sums = (emitter.local(heads * groups * dim) for _ in range(2))
        self._largest, self._weights = (emitter.local(heads * groups * width) for _ in range(2))
        self._scores = emitter.local(groups * self._shape.block_size)
        self._chunks = range(0, dim, width)

    def text(self) -> str:
        emitter, shape, builder = self._emitter, self._shape, self._emitter.builder
        counter, size = emitter.argument_address(0), emitter.integer(shape.block_size)
        sequences, qkv, cosine, sine, blocks, heads, tables, table_width, positions, out = (
            emitter.argument(index) for index in range(1, 11)
        )
        number_bytes, dim = self._stored.num_bytes, shape.head_dim
        shares = builder.sdiv(emitter.integer(shape.num_kv_heads), heads)
        with emitter.tasks(counter, builder.mul(sequences, shares)) as task:
            sequence = builder.sdiv(task, shares)
            first = builder.mul(builder.srem(task, shares), heads)
            end = builder.add(first, heads)
            table = emitter.offset(tables, (builder.mul(sequence, table_width), 8))
            position = emitter.load_integer(positions, sequence)
            rotation = [emitter.offset(one, (sequence, dim * number_bytes)) for one in (cosine, sine)]
            last = builder.sdiv(position, size)
            row = emitter.offset(qkv, (sequence, shape.num_heads * dim * number_bytes))
            own, place = self._block(blocks, table, last), builder.srem(position, size)
            with emitter.loop(end, start=first) as head:
                if not self._is_stored:
                    self._store(row, rotation, own, place, head)
                self._begin(row, rotation, head)
            length, seen = builder.add(position, emitter.integer(1)), self._first_seen(position)
            with emitter.loop(builder.add(last, emitter.integer(1)), start=builder.sdiv(seen, size)) as index:
                block = self._block(blocks, table, index)
                following = emitter.smaller_integer(builder.add(index, emitter.integer(1)), last)
                coming = self._block(blocks, table, following)
                before = builder.mul(index, size)
                hidden, left = builder.sub(seen, before), builder.sub(length, before)
                with emitter.loop(end, start=first) as head:
                    self._score(block, coming, head)
                    self._weigh(block, hidden, left, head)
                    self._sum(block, hidden, emitter.smaller_integer(left, size), head)
            with emitter.loop(end, start=first) as head:
                numbers = shape.num_groups * dim * number_bytes
                self._end(
                    emitter.offset(out, (sequence, shape.num_kv_heads * numbers), (head, numbers)), head
                )
        return emitter.finish()

    def _first_seen(self, position: ir.Value) -> ir.Value:
        """The first position that the token attends to."""
        emitter, window = self._emitter, self._scoring.window
        if window is None:
            return emitter.integer(0)
        first = emitter.builder.sub(position, emitter.integer(window - 1))
        return emitter.larger_integer(first, emitter.integer(0))

    def _block(self, blocks: ir.Value, table: ir.Value, index: ir.Value) -> ir.Value:
        return self._layout.block(self._emitter, blocks, self._emitter.load_integer(table, index))

    def _of_head(self, place: ir.Value, head: ir.Value, per_query_head: int) -> ir.Value:
        return self._emitter.offset(place, (head, self._shape.num_groups * per_query_head * 4))

    def _begin(self, row: ir.Value, rotation: list[ir.Value], head: ir.Value) -> None:
        """Rotate the head's queries, unless that is done; scale them, and begin with nothing attended to."""
        emitter, shape, stored = self._emitter, self._shape, self._stored
        groups, dim = shape.num_groups, shape.head_dim
        head_bytes = dim * stored.num_bytes
        queries, sums = (self._of_head(place, head, dim) for place in (self._queries, self._sums))
        largest, weights = (
            self._of_head(place, head, emitter.width) for place in (self._largest, self._weights)
        )
        scale = emitter.splat(self._scoring.scale * self._layout.unit)
        for group in range(groups):
            query = emitter.offset(row, (head, groups * head_bytes), (emitter.integer(group), head_bytes))
            rotated = (
                ((at, emitter.load(query, at, stored)) for at in self._chunks)
                if self._is_stored
                else emit_rotated(emitter, query, rotation, dim, stored)
            )
            for at, number in rotated:
                scaled = emitter.multiply(emitter.rounded(number, stored), scale)
                emitter.store(scaled, queries, group * dim + at, FLOAT32)
                emitter.store(emitter.splat(0.0), sums, group * dim + at, FLOAT32)
            emitter.store(emitter.splat(LOWEST), largest, group * emitter.width, FLOAT32)
            emitter.store(emitter.splat(0.0), weights, group * emitter.width, FLOAT32)

    def _store(
        self, row: ir.Value, rotation: list[ir.Value], block: ir.Value, place: ir.Value, head: ir.Value
    ) -> None:
        """The head's key, rotated, and its value."""
        emitter, shape, stored = self._emitter, self._shape, self._stored
        head_bytes, integer = shape.head_dim * stored.num_bytes, emitter.integer
        num_query_heads = shape.num_kv_heads * shape.num_groups
        key = emitter.offset(row, (integer(num_query_heads), head_bytes), (head, head_bytes))
        value = emitter.offset(key, (integer(shape.num_kv_heads), head_bytes))
        keys = list(emit_rotated(emitter, key, rotation, shape.head_dim, stored))
        values = [(at, emitter.load(value, at, stored)) for at in self._chunks]
        value_plane = emitter.builder.add(head, integer(shape.num_kv_heads))
        for plane, numbers in ((head, keys), (value_plane, values)):
            for _ in self._layout.store(emitter, numbers, block, plane, place):
                pass  # what it reads back is not needed here

    def _score(self, block: ir.Value, coming: ir.Value, head: ir.Value) -> None:
        """Scores of a block's tokens; asks for the next block's keys and values meanwhile."""
        emitter, shape, layout = self._emitter, self._shape, self._layout
        dim, token_bytes = shape.head_dim, layout.token_bytes
        # So many query heads and tokens make up a vector's lanes.
        groups = next(count for count in (4, 2, 1) if shape.num_groups % count == 0)
        num_tokens = emitter.width // groups
        queries, keys = self._of_head(self._queries, head, dim), layout.keys(emitter, block, head)
        coming_planes = [read(emitter, coming, head) for read in (layout.keys, layout.values)]
        if layout.has_scales:
            for read in (layout.key_scales, layout.value_scales):
                emitter.prefetch(read(emitter, coming, head), shape.block_size * SCALE_BYTES)
        with emitter.loop(shape.block_size, step=num_tokens) as token:
            for plane in coming_planes:
                emitter.prefetch(emitter.offset(plane, (token, token_bytes)), num_tokens * token_bytes)
            here = emitter.offset(keys, (token, token_bytes))
            for first in range(0, shape.num_groups, groups):
                products = [
                    emitter.dot(
                        [layout.load(emitter, here, index * dim + at) for at in self._chunks],
                        [emitter.load(queries, (first + group) * dim + at, FLOAT32) for at in self._chunks],
                    )
                    for group in range(groups)
                    for index in range(num_tokens)
                ]
                lanes = emitter.sums_by_lane(products)
                for group in range(groups):
                    place = emitter.offset(self._scores, (token, 4))
                    emitter.store_lanes(
                        lanes, group * num_tokens, num_tokens, place, (first + group) * shape.block_size
                    )

    def _weigh(self, block: ir.Value, hidden: ir.Value, left: ir.Value, head: ir.Value) -> None:
        """Turn scores into weights, as large as the largest score so far leaves them; the sums follow it.

        hidden: tokens of this block that are not seen; left: tokens from this block on.
        """
        emitter, shape = self._emitter, self._shape
        dim, width = shape.head_dim, emitter.width
        largest, weights = (self._of_head(place, head, width) for place in (self._largest, self._weights))
        sums = self._of_head(self._sums, head, dim)
        tokens = range(0, shape.block_size, width)
        for group in range(shape.num_groups):
            scores = [self._meant(block, group, token, hidden, left, head) for token in tokens]
            before = emitter.load(largest, group * width, FLOAT32)
            now = before
            for score in scores:
                now = emitter.larger(score, now)
            now = emitter.largest_lane(now)
            emitter.store(now, largest, group * width, FLOAT32)
            shrunk = emitter.exp(emitter.subtract(before, now))
            total = emitter.multiply(emitter.load(weights, group * width, FLOAT32), shrunk)
            for token, score in zip(tokens, scores, strict=True):
                weight = emitter.exp(emitter.subtract(score, now))
                total = emitter.add(total, weight)
                if self._layout.has_scales:
                    scales = self._layout.value_scales(emitter, block, head)
                    weight = emitter.multiply(weight, emitter.load(scales, token, FLOAT32))
                emitter.store(weight, self._scores, group * shape.block_size + token, FLOAT32)
            emitter.store(total, weights, group * width, FLOAT32)
            for at in self._chunks:
                summed = emitter.multiply(emitter.load(sums, group * dim + at, FLOAT32), shrunk)
                emitter.store(summed, sums, group * dim + at, FLOAT32)

    def _meant(
        self, block: ir.Value, group: int, token: int, hidden: ir.Value, left: ir.Value, head: ir.Value
    ) -> ir.Value:
        """A vector's scores from `token` on, scaled, capped and masked."""
        emitter, scoring = self._emitter, self._scoring
        score = emitter.load(self._scores, group * self._shape.block_size + token, FLOAT32)
        if self._layout.has_scales:
            scales = self._layout.key_scales(emitter, block, head)
            score = emitter.multiply(score, emitter.load(scales, token, FLOAT32))
        if scoring.soft_cap is not None:
            score = emit_capped(emitter, score, scoring.soft_cap)
        score = emitter.masked(score, emitter.builder.sub(left, emitter.integer(token)), LOWEST)
        if scoring.window is None:
            return score
        return emitter.masked_first(score, emitter.builder.sub(hidden, emitter.integer(token)), LOWEST)

    def _sum(self, block: ir.Value, hidden: ir.Value, end: ir.Value, head: ir.Value) -> None:
        """Add the values of the block's tokens below `end`, and not hidden, times their weights."""
        emitter, shape, layout = self._emitter, self._shape, self._layout
        dim, token_bytes = shape.head_dim, layout.token_bytes
        values, sums = layout.values(emitter, block, head), self._of_head(self._sums, head, dim)
        nothing = emitter.integer(0)
        start = nothing if self._scoring.window is None else emitter.larger_integer(hidden, nothing)
        for groups, chunks in self._shares():
            running = {
                (group, at): emitter.variable(emitter.load(sums, group * dim + at, FLOAT32))
                for group in groups
                for at in chunks
            }
            with emitter.loop(end, start=start) as token:
                place = emitter.offset(self._scores, (token, 4))
                weights = [emitter.load_number(place, group * shape.block_size) for group in groups]
                here = emitter.offset(values, (token, token_bytes))
                for at in chunks:
                    value = layout.load(emitter, here, at)
                    for group, weight in zip(groups, weights, strict=True):
                        one = running[group, at]
                        one.set(emitter.multiply_add(weight, value, one.get()))
            for (group, at), one in running.items():
                emitter.store(one.get(), sums, group * dim + at, FLOAT32)

    def _shares(self) -> list[tuple[range, range]]:
        """Which query heads' sums, and which numbers of theirs, registers hold at once."""
        groups, width = self._shape.num_groups, self._emitter.width
        most = SUMS_AT_ONCE[width]
        at_once = max(1, most // len(self._chunks))
        step = most * width
        return [
            (
                range(first, min(first + at_once, groups)),
                range(at, min(at + step, self._shape.head_dim), width),
            )
            for first in range(0, groups, at_once)
            for at in range(0, self._shape.head_dim, step)
        ]

    def _end(self, out: ir.Value, head: ir.Value) -> None:
        """The weighted values over the sum of weights."""
        emitter, dim = self._emitter, self._shape.head_dim
        weights = self._of_head(self._weights, head, emitter.width)
        sums = self._of_head(self._sums, head, dim)
        for group in range(self._shape.num_groups):
            total = emitter.sum_of_lanes(emitter.load(weights, group * emitter.width, FLOAT32))
            inverse = emitter.divide(emitter.splat(self._layout.unit), total)
            for at in self._chunks:
                mean = emitter.multiply(emitter.load(sums, group * dim + at, FLOAT32), inverse)
                emitter.store(mean, out, group * dim + at, self._stored)

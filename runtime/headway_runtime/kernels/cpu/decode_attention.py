"""Attention of decodes: one new token of each of many sequences, against paged KV.

Does in one pass over the cache what takes PyTorch eight operators and a copy of all that is attended to:
rotates the new queries and keys, stores the new keys and values, and attends block by block with a running
maximum and sum (arXiv 1805.02867, as in FlashAttention, arXiv 2205.14135). A second kernel finds the first
two done, and otherwise computes the very same.
"""

from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.emitter import FLOAT32, LOWEST, Elements, Emitter
from headway_runtime.kernels.cpu.rotation import AttentionShape, emit_rotated

# Vectors of weighted values that are summed at once: as many as AVX-512's registers hold beside what they are
# made of, and half as many where there are fewer or smaller ones.
SUMS_AT_ONCE = {16: 16, 8: 8, 4: 8}
STORED_NAME = "stored_decode_attention"


class DecodeAttention:
    """The kernels for one shape."""

    __slots__ = ("_kernel", "_shape", "_stored_text")

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, width: int) -> None:
        self._shape = shape
        name = "decode_attention"
        self._kernel = Kernel(name, _text(name, shape, elements(dtype), width, is_stored=False))
        # Compiled when it is first needed, which is seldom.
        self._stored_text = partial(_text, STORED_NAME, shape, elements(dtype), width, is_stored=True)

    def __call__(
        self,
        qkv: Tensor,
        cosine: Tensor,
        sine: Tensor,
        blocks: Tensor,
        tables: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """Rows of one token each; all tensors contiguous.

        qkv: [sequences, heads * head_dim], before rotation.
        cosine, sine: [sequences, head_dim], from `RotaryTable`.
        blocks: one layer's cache, [blocks, 2 * kv_heads, block_size, head_dim]; written as well.
        tables: ids of each sequence's blocks, int64 [sequences, width]; positions: of the tokens, int64.
        out: [sequences, kv_heads * num_groups * head_dim].
        """
        assert cosine.is_contiguous()
        assert sine.is_contiguous()
        rotation = (cosine.data_ptr(), sine.data_ptr())
        self._run(self._kernel, qkv, rotation, blocks, tables, positions, out)

    def attend_stored(
        self, qkv: Tensor, blocks: Tensor, tables: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        """The same after `RotateAndStore`. Rows may be one sequence's, with those before each stored too."""
        kernel = Kernel(STORED_NAME, self._stored_text())
        self._run(kernel, qkv, (0, 0), blocks, tables, positions, out)

    def _run(
        self,
        kernel: Kernel,
        qkv: Tensor,
        rotation: tuple[int, int],
        blocks: Tensor,
        tables: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        assert all(one.is_contiguous() for one in (qkv, blocks, positions, out))
        assert tables.dtype == positions.dtype == torch.int64
        assert tables.stride(1) == 1
        num_sequences, num_threads = len(tables), torch.get_num_threads()
        num_heads = self._shape.num_kv_heads
        # Neighbouring heads of a block are neighbours in memory, so one thread takes all that it can.
        while num_sequences * (self._shape.num_kv_heads // num_heads) < 2 * num_threads and num_heads > 1:
            num_heads = num_heads // 2 if num_heads % 2 == 0 else 1
        kernel.run(
            num_threads,
            num_sequences,
            qkv.data_ptr(),
            *rotation,
            blocks.data_ptr(),
            num_heads,
            tables.data_ptr(),
            tables.stride(0),
            positions.data_ptr(),
            out.data_ptr(),
        )


@cache
def _text(name: str, shape: AttentionShape, stored: Elements, width: int, *, is_stored: bool) -> str:
    return _Writer(name, shape, stored, width, is_stored=is_stored).text()


class _Writer:
    """Writes the kernel. A task is one sequence and some of its KV heads, numbers `first` to below `end`."""

    def __init__(
        self, name: str, shape: AttentionShape, stored: Elements, width: int, *, is_stored: bool
    ) -> None:
        """stored: the cache's numbers. is_stored: whether rows are rotated and their KV stored."""
        self._shape = shape
        self._stored = stored
        self._is_stored = is_stored
        self._emitter = emitter = Emitter(name, width)
        heads, groups, dim = shape.num_kv_heads, shape.num_groups, shape.head_dim
        # Of each query head: itself, the weighted values so far, the largest score and the sum of weights
        # (of each lane), and a block's scores, then weights.
        self._queries, self._sums = (emitter.local(heads * groups * dim) for _ in range(2))
        self._largest, self._weights = (emitter.local(heads * groups * width) for _ in range(2))
        self._scores = emitter.local(groups * shape.block_size)
        self._chunks = range(0, dim, width)
        self._block_bytes = shape.block_size * dim * stored.num_bytes

    def text(self) -> str:
        emitter, shape, builder = self._emitter, self._shape, self._emitter.builder
        counter = emitter.argument_address(0)
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
            own = self._block(blocks, table, builder.sdiv(position, emitter.integer(shape.block_size)))
            place = builder.srem(position, emitter.integer(shape.block_size))
            with emitter.loop(end, start=first) as head:
                row = emitter.offset(qkv, (sequence, shape.num_heads * dim * number_bytes))
                slot = emitter.offset(own, (place, dim * number_bytes), (head, self._block_bytes))
                self._begin(row, rotation, slot, head)
            length = builder.add(position, emitter.integer(1))
            last = builder.sdiv(position, emitter.integer(shape.block_size))
            with emitter.loop(builder.add(last, emitter.integer(1))) as index:
                block = self._block(blocks, table, index)
                following = emitter.smaller_integer(builder.add(index, emitter.integer(1)), last)
                coming = self._block(blocks, table, following)
                left = builder.sub(length, builder.mul(index, emitter.integer(shape.block_size)))
                with emitter.loop(end, start=first) as head:
                    here, there = (emitter.offset(one, (head, self._block_bytes)) for one in (block, coming))
                    self._score(here, there, head)
                    self._weigh(left, head)
                    self._sum(here, emitter.smaller_integer(left, emitter.integer(shape.block_size)), head)
            with emitter.loop(end, start=first) as head:
                numbers = shape.num_groups * dim * number_bytes
                self._end(
                    emitter.offset(out, (sequence, shape.num_kv_heads * numbers), (head, numbers)), head
                )
        return emitter.finish()

    def _block(self, blocks: ir.Value, table: ir.Value, index: ir.Value) -> ir.Value:
        number = self._emitter.load_integer(table, index)
        return self._emitter.offset(blocks, (number, 2 * self._shape.num_kv_heads * self._block_bytes))

    def _values(self, keys: ir.Value) -> ir.Value:
        """Where the values lie whose keys lie there."""
        return self._emitter.offset(
            keys, (self._emitter.integer(self._shape.num_kv_heads), self._block_bytes)
        )

    def _of_head(self, place: ir.Value, head: ir.Value, per_query_head: int) -> ir.Value:
        return self._emitter.offset(place, (head, self._shape.num_groups * per_query_head * 4))

    def _begin(self, row: ir.Value, rotation: list[ir.Value], slot: ir.Value, head: ir.Value) -> None:
        """Rotate the head's queries and key, store its key and value, unless that is done."""
        emitter, shape, stored = self._emitter, self._shape, self._stored
        groups, dim = shape.num_groups, shape.head_dim
        head_bytes = dim * stored.num_bytes
        integer = emitter.integer
        if not self._is_stored:
            self._store(row, rotation, slot, head)
        queries, sums = (self._of_head(place, head, dim) for place in (self._queries, self._sums))
        largest, weights = (
            self._of_head(place, head, emitter.width) for place in (self._largest, self._weights)
        )
        scale = emitter.splat(dim**-0.5)
        for group in range(groups):
            query = emitter.offset(row, (head, groups * head_bytes), (integer(group), head_bytes))
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

    def _store(self, row: ir.Value, rotation: list[ir.Value], slot: ir.Value, head: ir.Value) -> None:
        """The head's key, rotated, and its value."""
        emitter, shape, stored = self._emitter, self._shape, self._stored
        head_bytes, integer = shape.head_dim * stored.num_bytes, emitter.integer
        num_query_heads = shape.num_kv_heads * shape.num_groups
        key = emitter.offset(row, (integer(num_query_heads), head_bytes), (head, head_bytes))
        for at, number in emit_rotated(emitter, key, rotation, shape.head_dim, stored):
            emitter.store(number, slot, at, stored)
        value, value_slot = emitter.offset(key, (integer(shape.num_kv_heads), head_bytes)), self._values(slot)
        for at in self._chunks:
            emitter.store(emitter.load(value, at, stored), value_slot, at, stored)

    def _score(self, keys: ir.Value, coming_keys: ir.Value, head: ir.Value) -> None:
        """Scores of a block's tokens; asks for the next block's keys and values meanwhile."""
        emitter, shape = self._emitter, self._shape
        dim, token_bytes = shape.head_dim, shape.head_dim * self._stored.num_bytes
        # So many query heads and tokens make up a vector's lanes.
        groups = next(count for count in (4, 2, 1) if shape.num_groups % count == 0)
        num_tokens = emitter.width // groups
        queries, coming_values = self._of_head(self._queries, head, dim), self._values(coming_keys)
        with emitter.loop(shape.block_size, step=num_tokens) as token:
            for coming in (coming_keys, coming_values):
                emitter.prefetch(emitter.offset(coming, (token, token_bytes)), num_tokens * token_bytes)
            here = emitter.offset(keys, (token, token_bytes))
            for first in range(0, shape.num_groups, groups):
                products = [
                    emitter.dot(
                        [emitter.load(here, index * dim + at, self._stored) for at in self._chunks],
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

    def _weigh(self, left: ir.Value, head: ir.Value) -> None:
        """Turn scores into weights, as large as the largest score so far leaves them; the sums follow it.

        left: tokens from this block on.
        """
        emitter, shape = self._emitter, self._shape
        dim, width = shape.head_dim, emitter.width
        largest, weights = (self._of_head(place, head, width) for place in (self._largest, self._weights))
        sums = self._of_head(self._sums, head, dim)
        for group in range(shape.num_groups):
            places = [group * shape.block_size + at for at in range(0, shape.block_size, width)]
            scores = [
                emitter.masked(
                    emitter.load(self._scores, place, FLOAT32),
                    emitter.builder.sub(left, emitter.integer(place - places[0])),
                    LOWEST,
                )
                for place in places
            ]
            before = emitter.load(largest, group * width, FLOAT32)
            now = before
            for score in scores:
                now = emitter.larger(score, now)
            now = emitter.largest_lane(now)
            emitter.store(now, largest, group * width, FLOAT32)
            shrunk = emitter.exp(emitter.subtract(before, now))
            total = emitter.multiply(emitter.load(weights, group * width, FLOAT32), shrunk)
            for place, score in zip(places, scores, strict=True):
                weight = emitter.exp(emitter.subtract(score, now))
                emitter.store(weight, self._scores, place, FLOAT32)
                total = emitter.add(total, weight)
            emitter.store(total, weights, group * width, FLOAT32)
            for at in self._chunks:
                summed = emitter.multiply(emitter.load(sums, group * dim + at, FLOAT32), shrunk)
                emitter.store(summed, sums, group * dim + at, FLOAT32)

    def _sum(self, keys: ir.Value, num_tokens: ir.Value, head: ir.Value) -> None:
        """Add the block's values times their weights."""
        emitter, shape = self._emitter, self._shape
        dim, token_bytes = shape.head_dim, shape.head_dim * self._stored.num_bytes
        values, sums = self._values(keys), self._of_head(self._sums, head, dim)
        at_once = max(1, SUMS_AT_ONCE[emitter.width] // len(self._chunks))
        for first in range(0, shape.num_groups, at_once):
            groups = range(first, min(first + at_once, shape.num_groups))
            running = {
                (group, at): emitter.variable(emitter.load(sums, group * dim + at, FLOAT32))
                for group in groups
                for at in self._chunks
            }
            with emitter.loop(num_tokens) as token:
                place = emitter.offset(self._scores, (token, 4))
                weights = [emitter.load_number(place, group * shape.block_size) for group in groups]
                here = emitter.offset(values, (token, token_bytes))
                for at in self._chunks:
                    value = emitter.load(here, at, self._stored)
                    for group, weight in zip(groups, weights, strict=True):
                        one = running[group, at]
                        one.set(emitter.multiply_add(weight, value, one.get()))
            for (group, at), one in running.items():
                emitter.store(one.get(), sums, group * dim + at, FLOAT32)

    def _end(self, out: ir.Value, head: ir.Value) -> None:
        """The weighted values over the sum of weights."""
        emitter, dim = self._emitter, self._shape.head_dim
        weights = self._of_head(self._weights, head, emitter.width)
        sums = self._of_head(self._sums, head, dim)
        for group in range(self._shape.num_groups):
            total = emitter.sum_of_lanes(emitter.load(weights, group * emitter.width, FLOAT32))
            inverse = emitter.divide(emitter.splat(1.0), total)
            for at in self._chunks:
                mean = emitter.multiply(emitter.load(sums, group * dim + at, FLOAT32), inverse)
                emitter.store(mean, out, group * dim + at, self._stored)

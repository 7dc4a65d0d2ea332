"""A Batch turned into tensors: tokens, positions, slots, and the gathers and masks that attention needs.

All integers of a step are written into one preallocated host buffer (pinned for CUDA) and cross to the device
in one copy; on a CPU that buffer is the device's memory already. Gathered KV goes into one workspace, which
grows to the largest step seen and is shared by all attention calls and layers.

On a CPU, bfloat16 products are oneDNN's, which makes a kernel for every shape that it meets: two milliseconds
and a megabyte each (docs/log.md). So shapes are rounded up to few: rows that belong to nobody follow the last
token, and the contexts of decodes end in null blocks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig
from headway_runtime.layers.attention import (
    CHUNK_ROWS,
    AttentionInputs,
    FirstChunk,
    GatheredCall,
    KVShape,
    attends_by_products,
)

# Contexts of up to so many blocks share a call whatever their lengths: a call costs more than the padding.
SMALL_CONTEXT_BLOCKS = 8
# What several decodes gather together on a CPU: more no longer stays in its cache until it is attended to.
CPU_WORKSPACE_BYTES = 4 << 20

# How many sizes there are between a power of two and the next one; below that power all are exact.
ROWS_PER_OCTAVE = 8
BLOCKS_PER_OCTAVE = 4

Integers = NDArray[numpy.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors.

    token_ids, positions: of every row; the rows past the last token belong to nobody.
    sample_rows: rows after which a token is sampled, in ascending order, and then some that do not count.
    sampled: the chunk that each of these rows belongs to, as an index into the batch.
    order: all chunks in the order of their rows, as indices into the batch.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sample_rows: Tensor
    sampled: list[int]
    order: list[int]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Chunks that one attention call serves, and the rows [start, end) that they make."""

    chunks: Sequence[Chunk]
    start: int
    end: int

    @property
    def is_chunk(self) -> bool:
        return self.end - self.start > len(self.chunks)

    @property
    def needs_cache(self) -> bool:
        return not self.is_chunk or self.chunks[0].start > 0


class StepInputBuilder:
    """Owns the buffers; a step's inputs are valid until the next one's are built."""

    def __init__(
        self,
        config: EngineConfig,
        shape: KVShape,
        num_attention_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._num_groups = num_attention_heads // shape.num_kv_heads
        self._dtype = dtype
        envelope = config.envelope
        blocks_per_sequence = -(-config.max_model_len // shape.block_size)
        # Token, position and slot of each token; sampled row and padded block table of each sequence.
        self._rounds = device.type == "cpu" and dtype == torch.bfloat16
        self._most_context_blocks = blocks_per_sequence
        tokens, sequences = map(
            partial(round_up, per_octave=ROWS_PER_OCTAVE),
            (envelope.max_num_batched_tokens, envelope.max_num_seqs),
        )
        size = 3 * tokens + sequences + envelope.max_num_seqs * blocks_per_sequence
        self._integers = _IntegerBuffer(size, device)
        self._ramp = torch.arange(blocks_per_sequence * shape.block_size, device=device)
        self._workspace = torch.zeros(0, dtype=dtype, device=device)
        self._by_products = attends_by_products(dtype, device)
        later = torch.full((CHUNK_ROWS, CHUNK_ROWS), -math.inf, dtype=dtype, device=device)
        self._causal = later.triu_(1).unsqueeze(1)
        block_bytes = shape.block_numel * self._workspace.element_size()
        self._most_blocks = max(1, CPU_WORKSPACE_BYTES // block_bytes) if device.type == "cpu" else None

    def build(self, batch: Batch) -> StepInputs:
        """Rows are the decodes, longest context first, then the batch's other chunks in order."""
        num_decodes, block_size = batch.num_decodes, self._shape.block_size
        order = sorted(range(num_decodes), key=lambda index: -batch.chunks[index].start)
        order.extend(range(num_decodes, len(batch.chunks)))
        chunks = [batch.chunks[index] for index in order]
        stretches = list(_stretches(chunks, num_decodes, block_size, self._most_blocks))
        ends = accumulate(chunk.num_tokens for chunk in chunks)
        sampled = [
            (index, end - 1) for index, end, one in zip(order, ends, chunks, strict=True) if one.samples
        ]

        integers = self._integers
        integers.clear()
        own_token_ids, own_positions, own_slots = _token_rows(chunks, num_decodes, block_size)
        num_padding = self._num_padding(own_token_ids.size)
        token_ids = integers.write(own_token_ids, num_padding)
        positions = integers.write(own_positions, num_padding)
        slots = integers.write(own_slots)
        sample_rows = integers.write(
            numpy.array([row for _, row in sampled], dtype=numpy.int64), self._num_padding(len(sampled))
        )
        tables = [
            integers.write(_block_table(stretch, block_size, self._context_blocks))
            if stretch.needs_cache
            else None
            for stretch in stretches
        ]
        integers.upload()

        self._reserve(max((table.numel() for table in tables if table is not None), default=0))
        calls = [
            FirstChunk(stretch.start, stretch.end)
            if table is None
            else self._gathered(stretch, table, positions)
            for stretch, table in zip(stretches, tables, strict=True)
        ]
        attention = AttentionInputs(slots, self._causal, calls, num_padding)
        return StepInputs(
            token_ids, positions, attention, sample_rows, [index for index, _ in sampled], order
        )

    def _num_padding(self, num_rows: int) -> int:
        return round_up(num_rows, per_octave=ROWS_PER_OCTAVE) - num_rows if self._rounds else 0

    def _context_blocks(self, num_blocks: int) -> int:
        """How many blocks decodes gather of a context that fills `num_blocks`."""
        if not self._rounds:
            return num_blocks
        return min(round_up(num_blocks, per_octave=BLOCKS_PER_OCTAVE), self._most_context_blocks)

    def _reserve(self, num_blocks: int) -> None:
        needed = num_blocks * self._shape.block_numel
        if needed > self._workspace.numel():
            self._workspace = self._workspace.new_zeros(max(needed, 2 * self._workspace.numel()))

    def _gathered(self, stretch: _Stretch, table: Tensor, positions: Tensor) -> GatheredCall:
        """table: [sequences, blocks], ids padded with the null block."""
        shape = self._shape
        num_sequences, context = len(table), table.shape[1] * shape.block_size
        gathered = self._workspace[: table.numel() * shape.block_numel].view(
            shape.num_planes, table.numel(), -1
        )
        key, value = gathered.view(shape.num_planes, num_sequences, context, -1).chunk(2)
        mask: Tensor | None = None
        if not (stretch.is_chunk and self._by_products):
            is_later = self._ramp[:context] > positions[stretch.start : stretch.end].unsqueeze(1)
            mask = torch.zeros(is_later.shape, dtype=self._dtype, device=is_later.device)
            mask.masked_fill_(is_later, -math.inf)
        if mask is not None and not stretch.is_chunk:
            # In full, once for all layers: a batched product takes nothing that would have to be repeated.
            scores = (shape.num_kv_heads, num_sequences, self._num_groups, context)
            mask = mask.unsqueeze(1).expand(scores).contiguous()
        return GatheredCall(
            start=stretch.start,
            end=stretch.end,
            is_chunk=stretch.is_chunk,
            blocks=table.flatten(),
            gathered=gathered,
            key=key,
            value=value,
            first_position=stretch.chunks[0].start if stretch.is_chunk else 0,
            mask=mask,
        )


class _IntegerBuffer:
    """Preallocated int64 storage, filled on the host and uploaded at once."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._array: Integers = self._host.numpy()
        self._on_device = self._host if device.type == "cpu" else self._host.to(device)
        self._length = 0

    def clear(self) -> None:
        self._length = 0

    def write(self, values: Integers, num_padding: int = 0) -> Tensor:
        """Append values, and zeros after them; returns what holds both on the device after `upload`."""
        start, end = self._length, self._length + values.size
        self._array[start:end] = values.reshape(-1)
        self._length = end + num_padding
        if num_padding:
            self._array[end : self._length] = 0
            return self._on_device[start : self._length]
        return self._on_device[start:end].view(values.shape)

    def upload(self) -> None:
        if self._on_device is not self._host:
            self._on_device[: self._length].copy_(self._host[: self._length], non_blocking=True)


def round_up(size: int, *, per_octave: int) -> int:
    """The next of `per_octave` evenly spaced sizes between two powers of two; small sizes are themselves."""
    shift = max(0, (size - 1).bit_length() - per_octave.bit_length())
    return -(-size >> shift) << shift


def _stretches(
    chunks: Sequence[Chunk], num_decodes: int, block_size: int, most_blocks: int | None
) -> Iterator[_Stretch]:
    """Cut decodes, longest context first, where one is less than half its group's longest; then chunks.

    most_blocks: how many blocks, padding included, a group of several may have.
    """
    start = 0
    while start < num_decodes:
        longest = chunks[start].start // block_size + 1
        least = 1 if longest <= SMALL_CONTEXT_BLOCKS else longest // 2
        end, limit = start + 1, num_decodes
        if most_blocks is not None:
            limit = min(limit, start + max(1, most_blocks // longest))
        while end < limit and chunks[end].start // block_size + 1 >= least:
            end += 1
        yield _Stretch(chunks[start:end], start, end)
        start = end
    for chunk in chunks[num_decodes:]:
        yield _Stretch([chunk], start, start + chunk.num_tokens)
        start += chunk.num_tokens


def _token_rows(
    chunks: Sequence[Chunk], num_decodes: int, block_size: int
) -> tuple[Integers, Integers, Integers]:
    """Token ids, positions and slots of all rows."""
    decodes = chunks[:num_decodes]
    starts = [chunk.start for chunk in decodes]
    token_ids = [numpy.array([chunk.token_ids[chunk.start] for chunk in decodes], dtype=numpy.int64)]
    positions = [numpy.array(starts, dtype=numpy.int64)]
    blocks = [chunk.block_table[chunk.start // block_size] for chunk in decodes]
    slots = [numpy.array(blocks, dtype=numpy.int64) * block_size + positions[0] % block_size]
    for chunk in chunks[num_decodes:]:
        end = chunk.start + chunk.num_tokens
        own = numpy.arange(chunk.start, end)
        token_ids.append(numpy.array(chunk.token_ids[chunk.start : end], dtype=numpy.int64))
        positions.append(own)
        table = numpy.array(chunk.block_table, dtype=numpy.int64)
        slots.append(table[own // block_size] * block_size + own % block_size)
    return numpy.concatenate(token_ids), numpy.concatenate(positions), numpy.concatenate(slots)


def _block_table(stretch: _Stretch, block_size: int, context_blocks: Callable[[int], int]) -> Integers:
    """Block ids [sequences, blocks of the longest], padded with the null block; more of it for decodes."""
    lengths = [-(-(chunk.start + chunk.num_tokens) // block_size) for chunk in stretch.chunks]
    width = max(lengths) if stretch.is_chunk else context_blocks(max(lengths))
    table = numpy.zeros((len(lengths), width), dtype=numpy.int64)
    for row, (chunk, length) in enumerate(zip(stretch.chunks, lengths, strict=True)):
        table[row, :length] = chunk.block_table[:length]
    return table

"""A Batch turned into tensors: tokens, positions, slots, and the gathers and masks that attention needs.

All integers of a step are written into one preallocated host buffer (pinned for CUDA) and cross to the device
in one copy; on a CPU that buffer is the device's memory already.

Where a CPU's bfloat16 products are oneDNN's, it makes a kernel for every shape that it meets, of two
milliseconds and a megabyte (docs/log.md). There the numbers of rows are rounded up to few: rows that belong
to nobody follow the last token.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.config import EngineConfig
from headway_runtime.layers.attention import (
    AttentionInputs,
    Decodes,
    DecodesAgain,
    FirstChunk,
    KVCache,
    LaterChunk,
    Paged,
)
from headway_runtime.layers.linear import round_up
from headway_runtime.layers.masks import Masks
from headway_runtime.paged_inputs import few_tokens_first, num_paged_integers, paged_calls

# Contexts of up to so many blocks share a call whatever their lengths: a call costs more than the padding.
SMALL_CONTEXT_BLOCKS = 8

# Of more generated tokens than this, each sequence's have a call of their own: tables are copied by row.
SHORT_AGAIN_TOKENS = 32

# How many sizes there are between a power of two and the next one; below that power all are exact.
ROWS_PER_OCTAVE = 8

Integers = NDArray[numpy.int64]


class Rows(Protocol):
    """What computing asks of a chunk; `batch.Chunk` is one, which says what these are."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def samples(self) -> bool: ...
    @property
    def block_table(self) -> "array[int]": ...
    @property
    def ahead(self) -> tuple[int, ...]: ...
    def tokens(self) -> list[int]: ...


class Work(Protocol):
    """The same of a batch; `batch.Batch` is one."""

    @property
    def chunks(self) -> Sequence[Rows]: ...
    @property
    def num_decodes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors.

    token_ids, positions: of every row; the rows past the last token belong to nobody.
    sample_rows: rows after which a token is sampled, in ascending order, and then some that do not count.
    sampled: the chunk that each of these rows belongs to, as an index into the batch.
    order: all chunks in the order of their rows, as indices into the batch.
    fed: rows whose tokens are samples of the step before, and which these are; None where there is none.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sample_rows: Tensor
    sampled: list[int]
    order: list[int]
    fed: tuple[Tensor, Tensor] | None = None


class _Kind(Enum):
    DECODES = "one token each"
    CHUNK = "tokens of a prompt"
    AGAIN = "generated tokens whose KV was lost"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rows [start, end), which one attention call serves, and their chunks.

    All but decodes and short ones of generated tokens have one chunk.
    first_position: of the first row.
    """

    kind: _Kind
    chunks: Sequence[Rows]
    start: int
    end: int
    first_position: int

    @property
    def needs_cache(self) -> bool:
        return self.kind is not _Kind.CHUNK or self.first_position > 0


class StepInputBuilder:
    """Owns the buffers; a step's inputs are valid until the next one's are built."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounds: bool,
    ) -> None:
        """rounds: whether each number of rows costs a kernel, so that there shall be few."""
        self._block_size = cache.shape.block_size
        self._has_kernels = cache.kernels is not None
        self._gpu_kernels = cache.gpu_kernels
        self._dtype = dtype
        envelope = config.envelope
        blocks_per_sequence = -(-config.max_model_len // self._block_size)
        # Token, position and slot of each token; sampled row and padded block table of each sequence.
        self._rounds = rounds
        tokens, sequences = map(
            partial(round_up, per_octave=ROWS_PER_OCTAVE),
            (envelope.max_num_batched_tokens, envelope.max_num_seqs),
        )
        # Guesses make more sampled rows than sequences.
        sampled = min(tokens, sequences * (1 + envelope.num_speculative_tokens))
        # Rows that are fed, and with what.
        size = 3 * tokens + sampled + 2 * sequences
        size += max(
            envelope.max_num_seqs * blocks_per_sequence,
            -(-num_paged_integers(envelope.max_num_seqs, blocks_per_sequence) // 2),
        )
        self._integers = _IntegerBuffer(size, device)
        self._ramp = torch.arange(blocks_per_sequence * self._block_size, device=device)

    def build(self, batch: Work, sources: Mapping[int, int] | None = None) -> StepInputs:
        """Rows are the decodes, longest context first, then short chunks of generated tokens, then others.

        sources: of chunks whose last token is a sample of the step before, by index, which sample.
        """
        block_size, of_batch = self._block_size, batch.chunks
        # Kernels add up chunks in another order than decodes; a prompt's tokens are chunks, be it one alone.
        decodes = [
            index
            for index, chunk in enumerate(of_batch[: batch.num_decodes])
            if chunk.num_tokens == 1 and (not self._has_kernels or chunk.start >= chunk.num_prompt_tokens)
        ]
        num_decodes = len(decodes)
        order = sorted(decodes, key=lambda index: -of_batch[index].start)
        others = sorted(set(range(len(of_batch))).difference(decodes))
        order.extend(sorted(others, key=lambda index: not _is_short_again(of_batch[index])))
        num_few = 0
        if self._gpu_kernels is not None:
            order, num_few = few_tokens_first(order, of_batch, self._gpu_kernels.num_groups)
        chunks = [of_batch[index] for index in order]
        stretches = []
        if self._gpu_kernels is None:
            stretches = list(_stretches(chunks, num_decodes, block_size, has_kernels=self._has_kernels))
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        # One that has guesses is sampled after each of them, too.
        sampled = [
            (index, row)
            for index, end, one in zip(order, ends, chunks, strict=True)
            if one.samples
            for row in (range(end - one.num_tokens, end) if one.ahead else (end - 1,))
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
            integers.write(_block_table(stretch, block_size)) if stretch.needs_cache else None
            for stretch in stretches
        ]
        fed = None
        if sources:
            rows = [end - 1 for index, end in zip(order, ends, strict=True) if index in sources]
            samples = [sources[index] for index in order if index in sources]
            fed = (integers.write(numpy.array(rows)), integers.write(numpy.array(samples)))
        calls: list[Decodes | FirstChunk | LaterChunk | DecodesAgain | Paged] = []
        if self._gpu_kernels is not None:
            calls.extend(paged_calls(chunks, num_few, block_size, integers.write_halves))
        integers.upload()

        calls.extend(
            self._call(stretch, table, positions[stretch.start : stretch.end])
            for stretch, table in zip(stretches, tables, strict=True)
        )
        place = None if self._has_kernels else (slots // block_size, slots % block_size)
        attention = AttentionInputs(slots, place, calls, num_decodes, num_padding)
        return StepInputs(
            token_ids, positions, attention, sample_rows, [index for index, _ in sampled], order, fed
        )

    def _num_padding(self, num_rows: int) -> int:
        return round_up(num_rows, per_octave=ROWS_PER_OCTAVE) - num_rows if self._rounds else 0

    def _call(
        self, stretch: _Stretch, table: Tensor | None, positions: Tensor
    ) -> Decodes | FirstChunk | LaterChunk | DecodesAgain:
        """table: [sequences, blocks], ids padded with the null block; positions: of the stretch's rows."""
        start, end = stretch.start, stretch.end
        if table is None:
            return FirstChunk(start, end, Masks(positions, self._ramp[: end - start], self._dtype))
        if stretch.kind is _Kind.AGAIN:
            counts = [chunk.num_tokens for chunk in stretch.chunks]
            if len(counts) == 1:
                return DecodesAgain(start, end, table.expand(end - start, -1), positions)
            row_of = numpy.repeat(numpy.arange(len(counts)), counts)
            tables = table.index_select(0, torch.from_numpy(row_of).to(table.device))
            return DecodesAgain(start, end, tables, positions)
        masks = Masks(positions, self._ramp[: table.shape[1] * self._block_size], self._dtype)
        if stretch.kind is _Kind.CHUNK:
            return LaterChunk(start, end, stretch.first_position, table[0], masks)
        return Decodes(start, end, table, positions, masks)


class _IntegerBuffer:
    """Preallocated int64 storage, filled on the host and uploaded at once.

    On the device it is one, as steps follow each other there. On the host there are two by turns: one step
    may be copied from its own while the next one is written; it has been read before the one after that is.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        is_shared = transfers.shares_memory(device)
        self._hosts = [
            transfers.host_memory(size, torch.int64, device).zero_() for _ in range(1 if is_shared else 2)
        ]
        self._arrays: list[Integers] = [host.numpy() for host in self._hosts]
        self._on_device = self._hosts[0] if is_shared else torch.zeros_like(self._hosts[0], device=device)
        self._turn = 0
        self._array = self._arrays[0]
        self._length = 0

    def clear(self) -> None:
        self._turn = (self._turn + 1) % len(self._hosts)
        self._array = self._arrays[self._turn]
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

    def write_halves(self, values: NDArray[numpy.int32]) -> Tensor:
        """The same for integers of half the size, whose addresses 16 bytes divide."""
        start = self._length + self._length % 2
        self._length = start + -(-values.size // 2)
        self._array[start : self._length].view(numpy.int32)[: values.size] = values.reshape(-1)
        halves = self._on_device[start : self._length].view(torch.int32)
        return halves[: values.size].view(values.shape)

    def upload(self) -> None:
        host = self._hosts[self._turn]
        if host is not self._on_device:
            transfers.fill(self._on_device[: self._length], host[: self._length])


def _stretches(
    chunks: Sequence[Rows], num_decodes: int, block_size: int, *, has_kernels: bool
) -> Iterator[_Stretch]:
    """Cut decodes, longest context first, where one is less than half its group's longest; then chunks.

    has_kernels: padding costs nothing, so all decodes are one stretch; and generated tokens that are computed
    again are one of their own, behind their prompt's.
    """
    start = 0
    if has_kernels and num_decodes:
        yield _Stretch(_Kind.DECODES, chunks[:num_decodes], 0, num_decodes, chunks[0].start)
        start = num_decodes
    while start < num_decodes:
        longest = chunks[start].start // block_size + 1
        least = 1 if longest <= SMALL_CONTEXT_BLOCKS else longest // 2
        end = start + 1
        while end < num_decodes and chunks[end].start // block_size + 1 >= least:
            end += 1
        yield _Stretch(_Kind.DECODES, chunks[start:end], start, end, chunks[start].start)
        start = end
    first_other = num_decodes
    while has_kernels and first_other < len(chunks) and _is_short_again(chunks[first_other]):
        first_other += 1
    if first_other > num_decodes:
        own = chunks[num_decodes:first_other]
        end = start + sum(chunk.num_tokens for chunk in own)
        yield _Stretch(_Kind.AGAIN, own, start, end, own[0].start)
        start = end
    for chunk in chunks[first_other:]:
        end = start + chunk.num_tokens
        left_of_prompt = max(0, chunk.num_prompt_tokens - chunk.start)
        middle = min(end, start + left_of_prompt) if has_kernels else end
        if middle > start:
            yield _Stretch(_Kind.CHUNK, [chunk], start, middle, chunk.start)
        if end > middle:
            yield _Stretch(_Kind.AGAIN, [chunk], middle, end, chunk.start + middle - start)
        start = end


def _is_short_again(chunk: Rows) -> bool:
    """A few generated tokens, guesses mostly: all such attend in one call."""
    return 1 < chunk.num_tokens <= SHORT_AGAIN_TOKENS and chunk.start >= chunk.num_prompt_tokens


def _token_rows(
    chunks: Sequence[Rows], num_decodes: int, block_size: int
) -> tuple[Integers, Integers, Integers]:
    """Token ids, positions and slots of all rows."""
    decodes = chunks[:num_decodes]
    starts = [chunk.start for chunk in decodes]
    latest = [chunk.tokens()[0] for chunk in decodes]
    token_ids = [numpy.array(latest, dtype=numpy.int64)]
    positions = [numpy.array(starts, dtype=numpy.int64)]
    blocks = [chunk.block_table[chunk.start // block_size] for chunk in decodes]
    slots = [numpy.array(blocks, dtype=numpy.int64) * block_size + positions[0] % block_size]
    for chunk in chunks[num_decodes:]:
        end = chunk.start + chunk.num_tokens
        own = numpy.arange(chunk.start, end)
        token_ids.append(numpy.array(chunk.tokens(), dtype=numpy.int64))
        positions.append(own)
        table = numpy.array(chunk.block_table, dtype=numpy.int64)
        slots.append(table[own // block_size] * block_size + own % block_size)
    return numpy.concatenate(token_ids), numpy.concatenate(positions), numpy.concatenate(slots)


def _block_table(stretch: _Stretch, block_size: int) -> Integers:
    """Block ids [sequences, blocks of the longest], padded with the null block."""
    if stretch.kind is _Kind.DECODES or len(stretch.chunks) > 1:
        ends = [chunk.start + chunk.num_tokens for chunk in stretch.chunks]
    else:
        ends = [stretch.first_position + stretch.end - stretch.start]
    lengths = [-(-end // block_size) for end in ends]
    table = numpy.zeros((len(lengths), max(lengths)), dtype=numpy.int64)
    for row, (chunk, length) in enumerate(zip(stretch.chunks, lengths, strict=True)):
        table[row, :length] = chunk.block_table[:length]
    return table

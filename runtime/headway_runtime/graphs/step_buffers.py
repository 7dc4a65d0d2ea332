"""The tensors of recorded steps: always the same, whatever the form; and how a batch gets into them.

All that the host knows of a step lies in one buffer, whose twin on the device is filled by one copy:

    number of columns of the tables | by row: positions, slots, places of the drawn tokens, seeds,
    context lengths, first rows, given tokens, sources, temperatures, top_k, top_p, min_p | tables, one behind
    the other

Context lengths, first rows and tables are of sequences, of which a step has as many as rows: sequences of
nobody make up for the difference. Each row of nobody is a sequence without a context, so it attends to
nothing, and it has no slot and is greedy: it stores nothing, and nobody reads what it draws. What is left of
the sequences has no row.

There are several such buffers on the host: steps in flight may still be read from some while the next step is
written into another.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.draws import MASK_64, split_mix
from headway_runtime.graphs.forms import StepForm
from headway_runtime.kernels.triton.draw import DrawParameters
from headway_runtime.kernels.triton.paged_rows import MOST_DECODED_TOKENS, PagedRows, rows_for
from headway_runtime.layers.attention import AttentionInputs, Paged
from headway_runtime.request import SamplingParams

# Parts begin at multiples of 16 bytes: kernels are compiled once for addresses that this divides.
ALIGNED_INTEGERS = 4
NO_SLOT = -1
NOT_SAMPLED_BEFORE = -1

# The parts that have a number for each row, and how many 32-bit integers it takes.
WIDE = ("positions", "slots", "draw_positions", "seeds")
NARROW = ("contexts", "starts", "given", "sources", "temperatures", "top_k", "top_p", "min_p")
FLOATS = frozenset({"temperatures", "top_p", "min_p"})


class Placed(Protocol):
    """One sequence's tokens of a step; `batch.Chunk` is one, which says what these are."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_table(self) -> "array[int]": ...
    def tokens(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where each part begins in a buffer, in 32-bit integers. room: numbers in each part. size: of all."""

    starts: dict[str, int]
    room: int
    tables: int
    size: int


def _parts(num_rows: int, blocks_per_sequence: int) -> _Parts:
    starts: dict[str, int] = {"width": 0}
    place = ALIGNED_INTEGERS
    # One more: first rows end with the number of all.
    room = -(-(num_rows + 1) // ALIGNED_INTEGERS) * ALIGNED_INTEGERS
    for name in (*WIDE, *NARROW):
        starts[name] = place
        place += room * (2 if name in WIDE else 1)
    return _Parts(starts, room, place, place + num_rows * blocks_per_sequence)


class _HostBuffer:
    """One of them. params: of the requests whose numbers lie in it, row by row."""

    def __init__(self, parts: _Parts, device: torch.device) -> None:
        self.tensor = transfers.host_memory(parts.size, torch.int32, device).zero_()
        integers: NDArray[numpy.int32] = self.tensor.numpy()
        self.width = integers[:1]
        self.tables = integers[parts.tables :]
        self.by_name = {
            name: _typed(integers[start : start + parts.room * (2 if name in WIDE else 1)], name)
            for name, start in parts.starts.items()
            if name != "width"
        }
        self.params: list[SamplingParams] = []


def _typed(integers: NDArray[numpy.int32], name: str) -> NDArray[numpy.generic]:
    if name == "seeds":
        return integers.view(numpy.uint64)
    if name in WIDE:
        return integers.view(numpy.int64)
    return integers.view(numpy.float32) if name in FLOATS else integers


class StepBuffers:
    """For steps of up to `num_rows` tokens, of sequences of up to `blocks_per_sequence` blocks of
    `block_size` tokens.

    tokens: what the latest step has sampled after each row, int64, -1 for none; the next one may
    compute it. token_ids, tables: what the kernels of a step read, once `place_step` has written it.
    most_queries: tokens that a sequence may have.
    """

    def __init__(
        self,
        num_rows: int,
        num_tokens: int,
        blocks_per_sequence: int,
        block_size: int,
        num_groups: int,
        vocab_size: int,
        most_unread: int,
        device: torch.device,
    ) -> None:
        """num_tokens: that any step samples at most. num_groups: query heads to a KV head.

        most_unread: steps that are launched before the first of them is waited for.
        """
        parts = _parts(num_rows, blocks_per_sequence)
        self.num_rows, self._block_size, self._vocab_size = num_rows, block_size, vocab_size
        self.most_queries = max(
            number for number in range(1, MOST_DECODED_TOKENS + 1) if rows_for(number, num_groups) is not None
        )
        self._tables_start, self._room = parts.tables, parts.room
        self._hosts = [_HostBuffer(parts, device) for _ in range(most_unread)]
        self._turns = count()
        self._sent = torch.zeros(parts.size, dtype=torch.int32, device=device)
        self.width = self._sent[:1]
        self.sent_tables = self._sent[parts.tables :]
        self._by_name = {
            name: self._view(name, start) for name, start in parts.starts.items() if name != "width"
        }
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.tables = torch.zeros((num_rows, blocks_per_sequence), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max(num_rows, num_tokens), dtype=torch.int64, device=device)
        # Where each row is a sequence of one token.
        self._every_row = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def _view(self, name: str, start: int) -> Tensor:
        if name in WIDE:
            return self._sent[start : start + 2 * self._room].view(torch.int64)
        own = self._sent[start : start + self._room]
        return own.view(torch.float32) if name in FLOATS else own

    def of(self, name: str, size: int) -> Tensor:
        """The first numbers of a part, on the device."""
        return self._by_name[name][:size]

    def attention(self, form: StepForm) -> AttentionInputs:
        """What attention is told in a step of that form."""
        size = form.num_rows
        starts = self.of("starts", size + 1) if form.has_several else self._every_row[: size + 1]
        most_queries = self.most_queries if form.has_several else 1
        which = PagedRows(starts, self.of("contexts", size), self.tables[:size], size, most_queries)
        return AttentionInputs(self.of("slots", size), None, (Paged(0, size, which),), size)

    def draws(self, size: int) -> DrawParameters:
        """How each row's token is chosen."""
        return DrawParameters(
            None,
            self.of("temperatures", size),
            self.of("top_k", size),
            self.of("top_p", size),
            self.of("min_p", size),
            self.of("seeds", size),
            self.of("draw_positions", size),
        )

    def fill(
        self,
        chunks: Sequence[Placed],
        form: StepForm,
        sources: Mapping[int, int],
        params: list[SamplingParams] | None = None,
    ) -> None:
        """Have the device's buffer filled for a step of that form, whose first rows are the chunks'.

        sources: of rows whose token is not known, its place in `tokens`. params: of each row's request; None
            where no token is drawn here.
        """
        host = self._hosts[next(self._turns) % len(self._hosts)]
        num_tokens = self._write_rows(host, chunks, form, sources)
        if params is not None:
            if host.params != params:
                self._write_params(host, params)
            host.by_name["temperatures"][num_tokens : form.num_rows] = 0.0
        num_columns = self._write_tables(host, chunks)
        end = self._tables_start + len(chunks) * num_columns
        transfers.fill(self._sent[:end], host.tensor[:end])

    def _write_rows(
        self, host: _HostBuffer, chunks: Sequence[Placed], form: StepForm, sources: Mapping[int, int]
    ) -> int:
        """Returns how many rows the chunks have."""
        size, block_size, rows = form.num_rows, self._block_size, host.by_name
        starts = numpy.array([one.start for one in chunks], dtype=numpy.int64)
        if form.has_several:
            counts = numpy.array([one.num_tokens for one in chunks], dtype=numpy.int64)
            positions = numpy.concatenate([starts[:0], *map(_positions, chunks)])
            given = [token for one in chunks for token in one.tokens()]
            self._write_first_rows(rows["starts"], counts, size)
            contexts = starts + counts
        else:
            positions, contexts = starts, starts + 1
            given = [one.tokens()[0] for one in chunks]
        num_own = len(positions)
        assert num_own <= size <= self.num_rows
        blocks = numpy.array(
            [
                one.block_table[position // block_size]
                for one in chunks
                for position in range(one.start, one.start + one.num_tokens)
            ],
            dtype=numpy.int64,
        )
        for name, values, of_nobody in (
            ("positions", positions, 0),
            ("slots", blocks * block_size + positions % block_size, NO_SLOT),
            ("draw_positions", positions + 1, 0),
            ("given", given, 0),
            ("sources", NOT_SAMPLED_BEFORE, NOT_SAMPLED_BEFORE),
        ):
            rows[name][:num_own] = values
            rows[name][num_own:size] = of_nobody
        rows["contexts"][: len(chunks)] = contexts
        rows["contexts"][len(chunks) : size] = 0
        for row, place in sources.items():
            rows["sources"][row] = place
        return num_own

    def _write_first_rows(
        self, first_rows: NDArray[numpy.generic], counts: NDArray[numpy.int64], size: int
    ) -> None:
        """Of each sequence, and behind the last one. counts: rows of those that somebody has."""
        num_own = len(counts)
        first_rows[0] = 0
        first_rows[1 : num_own + 1] = numpy.cumsum(counts)
        of_nobody = int(counts.sum()) + numpy.arange(size - num_own + 1)
        first_rows[num_own : size + 1] = numpy.minimum(of_nobody, size)

    def _write_params(self, host: _HostBuffer, params: list[SamplingParams]) -> None:
        num_own, rows = len(params), host.by_name
        seeds = [split_mix(one.seed & MASK_64) for one in params]
        rows["seeds"][:num_own] = numpy.array(seeds, dtype=numpy.uint64)
        rows["top_k"][:num_own] = [min(one.top_k, self._vocab_size) for one in params]
        for name, attribute in (("temperatures", "temperature"), ("top_p", "top_p"), ("min_p", "min_p")):
            rows[name][:num_own] = [getattr(one, attribute) for one in params]
        host.params = params

    def _write_tables(self, host: _HostBuffer, chunks: Sequence[Placed]) -> int:
        """Returns the number of columns."""
        counts = [(one.start + one.num_tokens - 1) // self._block_size + 1 for one in chunks]
        num_columns = max(counts, default=0)
        host.width[0] = num_columns
        tables = host.tables[: len(chunks) * num_columns].reshape(len(chunks), num_columns)
        for row, (chunk, num_blocks) in enumerate(zip(chunks, counts, strict=True)):
            tables[row, :num_blocks] = chunk.block_table[:num_blocks]
        return num_columns


def _positions(chunk: Placed) -> NDArray[numpy.int64]:
    return numpy.arange(chunk.start, chunk.start + chunk.num_tokens)

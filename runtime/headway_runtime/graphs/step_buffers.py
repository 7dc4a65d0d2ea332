"""The tensors of recorded decode steps: always the same, whatever the size; and how a batch gets into them.

All that the host knows of a step lies in one buffer, whose twin on the device is filled by one copy:

    number of columns of the tables | by row: positions, slots, places of the drawn tokens, seeds,
    context lengths, given tokens, sources, temperatures, top_k, top_p, min_p | tables, row behind row

There are two such buffers on the host: the step in flight may still be read from the one while the next step
is written into the other. Rows of nobody have no context, no slot and are greedy: they attend to nothing,
store nothing, and nobody reads what they draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.batch import Chunk
from headway_runtime.draws import MASK_64, split_mix
from headway_runtime.kernels.triton.draw import DrawParameters
from headway_runtime.kernels.triton.paged_rows import PagedRows
from headway_runtime.layers.attention import AttentionInputs, Paged
from headway_runtime.request import SamplingParams

# Parts begin at multiples of 16 bytes: kernels are compiled once for addresses that this divides.
ALIGNED_INTEGERS = 4
NO_SLOT = -1
NOT_SAMPLED_BEFORE = -1

# The parts that have a number for each row, and how many 32-bit integers it takes.
WIDE = ("positions", "slots", "draw_positions", "seeds")
NARROW = ("contexts", "given", "sources", "temperatures", "top_k", "top_p", "min_p")
FLOATS = frozenset({"temperatures", "top_p", "min_p"})


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where each part begins in a buffer, in 32-bit integers. size: of all."""

    starts: dict[str, int]
    tables: int
    size: int


def _parts(num_rows: int, blocks_per_sequence: int) -> _Parts:
    starts: dict[str, int] = {"width": 0}
    place = ALIGNED_INTEGERS
    rows = -(-num_rows // ALIGNED_INTEGERS) * ALIGNED_INTEGERS
    for name in (*WIDE, *NARROW):
        starts[name] = place
        place += rows * (2 if name in WIDE else 1)
    return _Parts(starts, place, place + num_rows * blocks_per_sequence)


class _HostBuffer:
    """One of the two. params: of the requests whose numbers lie in it, row by row."""

    def __init__(self, parts: _Parts, num_rows: int, device: torch.device) -> None:
        self.tensor = transfers.host_memory(parts.size, torch.int32, device).zero_()
        integers: NDArray[numpy.int32] = self.tensor.numpy()
        self.width = integers[:1]
        self.tables = integers[parts.tables :]
        self.by_name = {
            name: _typed(integers[start : start + num_rows * (2 if name in WIDE else 1)], name)
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
    """For steps of up to `num_rows` sequences of up to `blocks_per_sequence` blocks of `block_size` tokens.

    tokens: what the latest step has sampled after each row, int64, -1 for none; the next one may
    compute it. token_ids, tables: what the kernels of a step read, once `place_step` has written it.
    """

    def __init__(
        self,
        num_rows: int,
        num_tokens: int,
        blocks_per_sequence: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """num_tokens: that any step samples at most."""
        parts = _parts(num_rows, blocks_per_sequence)
        self.num_rows, self._block_size, self._vocab_size = num_rows, block_size, vocab_size
        self._tables_start = parts.tables
        self._hosts = [_HostBuffer(parts, num_rows, device) for _ in range(2)]
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
        # Each row is a sequence of one token.
        self._query_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def _view(self, name: str, start: int) -> Tensor:
        if name in WIDE:
            return self._sent[start : start + 2 * self.num_rows].view(torch.int64)
        own = self._sent[start : start + self.num_rows]
        return own.view(torch.float32) if name in FLOATS else own

    def of(self, name: str, size: int) -> Tensor:
        """The first rows of a part, on the device."""
        return self._by_name[name][:size]

    def attention(self, size: int) -> AttentionInputs:
        """What attention is told in a step of so many rows."""
        which = PagedRows(
            self._query_starts[: size + 1], self.of("contexts", size), self.tables[:size], size, 1
        )
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

    def fill(self, chunks: Sequence[Chunk], size: int, sources: Mapping[int, int]) -> None:
        """Have the device's buffer filled for a step of `size` rows, the first of them the chunks'.

        sources: of chunks that do not know their token, by index, its place in `tokens`.
        """
        host = self._hosts[next(self._turns) % 2]
        num_own = len(chunks)
        assert num_own <= size <= self.num_rows
        self._write_rows(host, chunks, size, sources)
        params = [one.sampling for one in chunks]
        if host.params != params:
            self._write_params(host, params)
        host.by_name["temperatures"][num_own:size] = 0.0
        num_columns = self._write_tables(host, chunks)
        end = self._tables_start + num_own * num_columns
        transfers.fill(self._sent[:end], host.tensor[:end])

    def _write_rows(
        self, host: _HostBuffer, chunks: Sequence[Chunk], size: int, sources: Mapping[int, int]
    ) -> None:
        num_own, block_size = len(chunks), self._block_size
        starts = numpy.array([one.start for one in chunks], dtype=numpy.int64)
        own_blocks = numpy.array(
            [one.block_table[one.start // block_size] for one in chunks], dtype=numpy.int64
        )
        given = [one.token_ids[one.start] for one in chunks]
        rows = host.by_name
        for name, values, of_nobody in (
            ("positions", starts, 0),
            ("slots", own_blocks * block_size + starts % block_size, NO_SLOT),
            ("draw_positions", starts + 1, 0),
            ("contexts", starts + 1, 0),
            ("given", given, 0),
            ("sources", NOT_SAMPLED_BEFORE, NOT_SAMPLED_BEFORE),
        ):
            rows[name][:num_own] = values
            rows[name][num_own:size] = of_nobody
        for index, place in sources.items():
            rows["sources"][index] = place

    def _write_params(self, host: _HostBuffer, params: list[SamplingParams]) -> None:
        num_own, rows = len(params), host.by_name
        seeds = [split_mix(one.seed & MASK_64) for one in params]
        rows["seeds"][:num_own] = numpy.array(seeds, dtype=numpy.uint64)
        rows["top_k"][:num_own] = [min(one.top_k, self._vocab_size) for one in params]
        for name, attribute in (("temperatures", "temperature"), ("top_p", "top_p"), ("min_p", "min_p")):
            rows[name][:num_own] = [getattr(one, attribute) for one in params]
        host.params = params

    def _write_tables(self, host: _HostBuffer, chunks: Sequence[Chunk]) -> int:
        """Returns the number of columns."""
        counts = [one.start // self._block_size + 1 for one in chunks]
        num_columns = max(counts, default=0)
        host.width[0] = num_columns
        tables = host.tables[: len(chunks) * num_columns].reshape(len(chunks), num_columns)
        for row, (chunk, num_blocks) in enumerate(zip(chunks, counts, strict=True)):
            tables[row, :num_blocks] = chunk.block_table[:num_blocks]
        return num_columns

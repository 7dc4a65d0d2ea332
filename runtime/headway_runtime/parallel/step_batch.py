"""A step's work as ranks above 0 need it: which rows to compute, and after which of them logits are wanted.

Rank 0 alone samples, so of the requests only this crosses: a step's own tokens, never all that are known, and
of the block tables what reaches to the last computed token. Numbers lie in few arrays, which cross as bytes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway_runtime.batch import Batch

CHUNK_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """What computing asks of a `batch.Chunk`, as that has it."""

    start: int
    num_tokens: int
    num_prompt_tokens: int
    samples: bool
    block_table: "array[int]"
    own_tokens: list[int]
    ahead: tuple[int, ...]
    adapter: int

    def tokens(self) -> list[int]:
        return self.own_tokens


@dataclass(frozen=True, slots=True)
class StepBatch:
    """numbers: of each chunk its start, tokens, prompt tokens, whether it samples, table length, adapter.

    ahead: guesses by index of the chunk, where there are some; they are among the tokens, too.
    sources: of chunks that end in a sample of the step before, by index, which sample.
    """

    num_decodes: int
    numbers: "array[int]"
    tokens: "array[int]"
    tables: "array[int]"
    ahead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)

    @property
    def chunks(self) -> Sequence[ComputedRows]:
        found, token, entry = [], 0, 0
        for index in range(len(self.numbers) // CHUNK_NUMBERS):
            own = self.numbers[CHUNK_NUMBERS * index : CHUNK_NUMBERS * (index + 1)]
            start, count, prompt, samples, length, adapter = own
            found.append(
                ComputedRows(
                    start,
                    count,
                    prompt,
                    bool(samples),
                    self.tables[entry : entry + length],
                    self.tokens[token : token + count].tolist(),
                    self.ahead.get(index, ()),
                    adapter,
                )
            )
            token, entry = token + count, entry + length
        return found


def step_batch(batch: Batch, block_size: int, sources: dict[int, int] | None = None) -> StepBatch:
    """What ranks need of it. sources: as there."""
    numbers, tokens = array("q"), array("i")
    tables = array(batch.chunks[0].block_table.typecode) if batch.chunks else array("i")
    ahead = {}
    for index, chunk in enumerate(batch.chunks):
        length = -(-(chunk.start + chunk.num_tokens) // block_size)
        numbers.extend(
            (
                chunk.start,
                chunk.num_tokens,
                chunk.num_prompt_tokens,
                int(chunk.samples),
                length,
                chunk.adapter,
            )
        )
        tokens.extend(chunk.tokens())
        tables.extend(chunk.block_table[:length])
        if chunk.ahead:
            ahead[index] = chunk.ahead
    return StepBatch(batch.num_decodes, numbers, tokens, tables, ahead, sources or {})

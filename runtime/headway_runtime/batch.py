"""What crosses between the scheduler and the runner: a step's work one way, its samples the other.

Imports no torch, so that the scheduler can be driven, and simulated, without a model. A `Chunk` refers
to the live token list and block table of its sequence instead of copying them; the runner only reads them.
"""

from array import array
from dataclasses import dataclass

from headway_runtime.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step: compute the tokens at positions [start, start + num_tokens).

    token_ids: all known tokens of the sequence, prompt and generated.
    block_table: ids of the KV blocks that hold positions 0, block_size, 2 * block_size, ...; they reach past
        the last position computed here.
    num_generated: how many of token_ids were generated; the sampled token becomes the next one.
    samples: whether this chunk reaches the last known token, so that a next token is sampled after it.
    """

    request_id: str
    token_ids: list[int]
    start: int
    num_tokens: int
    block_table: "array[int]"
    num_generated: int
    samples: bool
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Chunks of a single token (decodes, nearly always) come first.

    num_decodes: how many of them there are.
    num_tokens: tokens of all chunks together; never above the limit that held when the batch was made.
    """

    chunks: tuple[Chunk, ...]
    num_decodes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The token chosen after one chunk; token_id None means that the logits were not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner made of a Batch: one entry per chunk, None where the chunk samples nothing."""

    samples: tuple[Sample | None, ...]

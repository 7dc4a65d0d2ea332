"""What crosses between the scheduler and the runner: a step's work one way, its samples the other.

Imports no torch, so that the scheduler can be driven, and simulated, without a model. A `Chunk` refers
to the live token list and block table of its sequence instead of copying them; the runner only reads them.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway_runtime.request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from headway_runtime.grammar_matcher import TokenMatcher


@dataclass(slots=True)
class Chunk:
    """One sequence's share of a step: compute the tokens at positions [start, start + num_tokens).

    Nobody changes one once it is made. It is not frozen because that makes making it three times as slow, and
    each step makes one per sequence.

    token_ids: all known tokens of the sequence, prompt and generated.
    block_table: ids of the KV blocks that hold positions 0, block_size, 2 * block_size, ...; they reach past
        the last position computed here.
    num_generated: how many of token_ids were generated; the sampled token becomes the next one.
    samples: whether this chunk reaches the last known token, so that a next token is sampled after it.
    matcher: where the generated tokens stand in the grammar that they must match; None if there is none.
    """

    request_id: str
    token_ids: list[int]
    start: int
    num_tokens: int
    block_table: "array[int]"
    num_generated: int
    samples: bool
    sampling: SamplingParams
    matcher: "TokenMatcher | None" = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_generated


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
    """The token chosen after one chunk.

    token_id: None if there is none: by `error`, if set, because of what the request allows; otherwise because
        the logits were not finite. error_param: the request's field that is at fault.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    error_param: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner made of a Batch.

    samples: one entry per chunk, None where the chunk samples nothing.
    prompt_logprobs: by index of the chunk, where they are asked for: one entry for each prompt token that
        follows a computed one.
    """

    samples: tuple[Sample | None, ...]
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)

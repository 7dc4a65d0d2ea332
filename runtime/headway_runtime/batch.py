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

# Among a sequence's tokens: one that a step which is under way samples. The device alone knows which it is.
UNREAD = -1


@dataclass(slots=True)
class Chunk:
    """One sequence's share of a step: compute the tokens at positions [start, start + num_tokens).

    No engine changes one once it is made. It is not frozen because that makes making it three times as slow,
    and each step makes one per sequence.

    token_ids: all known tokens of the sequence, prompt and generated; the last one may be UNREAD, if the step
        before samples it. They are more once the step has been launched.
    block_table: ids of the KV blocks that hold positions 0, block_size, 2 * block_size, ...; they reach past
        the last position computed here.
    num_generated: how many of token_ids were generated; the sampled token becomes the next one.
    samples: whether this chunk reaches the last known token, so that a next token is sampled after it.
    num_drafts: how many tokens may be guessed to follow the last known one, and computed with it; the block
        table has room for them.
    ahead: tokens guessed to follow token_ids, which count as known and generated here.
    adapter: the slot of the adapter that its tokens are computed with; 0: none.
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
    num_drafts: int = 0
    ahead: tuple[int, ...] = ()
    adapter: int = 0

    @property
    def num_known(self) -> int:
        return len(self.token_ids) + len(self.ahead)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) + len(self.ahead) - self.num_generated

    def tokens(self) -> list[int]:
        """Those at the positions of this chunk."""
        first, last = self.start, self.start + self.num_tokens
        num_own = len(self.token_ids)
        if last <= num_own:
            return self.token_ids[first:last]
        return [*self.token_ids[first:num_own], *self.ahead[max(0, first - num_own) : last - num_own]]


@dataclass(slots=True)
class Batch:
    """One step's work. Chunks of a single token (decodes, nearly always) come first. Not frozen because a
    simulation that takes many steps at once makes one out of another.

    num_decodes: how many of them there are.
    num_tokens: tokens of all chunks together, and of what may be guessed for them; never above the limit that
        held when the batch was made.
    num_drafts: of these, what may be guessed.
    """

    chunks: tuple[Chunk, ...]
    num_decodes: int
    num_tokens: int
    num_drafts: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all chunks but decodes."""
        return self.num_tokens - self.num_decodes - self.num_drafts


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
class Verified:
    """What became of the tokens that were guessed for one chunk.

    num_drafted: how many there were.
    samples: those after the chunk's own sample: one after each guess that came true, the last one new.
    is_finite: whether the logits after all guesses, also the wrong ones, were finite.
    """

    num_drafted: int
    samples: tuple[Sample, ...]
    is_finite: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner made of a Batch.

    samples: one entry per chunk, None where the chunk samples nothing.
    verified: by index of the chunk, where tokens were guessed.
    draft_seconds: what guessing took. num_draft_passes, draft_pass_seconds: passes of the draft model that
        say what a pass costs, and their time. num_caught_up, catch_up_seconds: tokens that it lacked and
        computed, and the time.
    prompt_logprobs: by index of the chunk, where they are asked for: one entry for each prompt token that
        follows a computed one. is_recorded: whether the step was launched as one.
    """

    samples: tuple[Sample | None, ...]
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    verified: Mapping[int, Verified] = field(default_factory=dict)
    draft_seconds: float = 0.0
    num_draft_passes: int = 0
    draft_pass_seconds: float = 0.0
    num_caught_up: int = 0
    catch_up_seconds: float = 0.0
    is_recorded: bool = False

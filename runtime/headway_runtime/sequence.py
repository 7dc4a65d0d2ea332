"""The state of one request inside the engine: its tokens, how many are computed, which blocks hold them.

Only the scheduler and its parts change a sequence. There are no phases: a sequence wants its computed tokens
to catch up with its known tokens, be it by a chunk of a prompt, by one decoded token, or again after a
preemption.

A step counts twice. Once it is launched, what it computes is computed for whatever is launched later, and the
token that it samples is a known one, though UNREAD. Once it is read, the token has its value, and what is in
the blocks is certain.
"""

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

from headway_runtime.adapters.adapter import NO_ADAPTER, Adapter
from headway_runtime.batch import UNREAD
from headway_runtime.draft_policy import Acceptance
from headway_runtime.request import FinishReason, Request, TokenLogprobs

if TYPE_CHECKING:
    from headway_runtime.grammar_matcher import TokenMatcher


class Sequence:
    """One accepted request.

    arrival: place in the order of acceptance; the oldest has the lowest.
    rank: who comes first when not all can be served, the lowest; unique, and the same for life.
    token_ids: prompt and answer so far; the last num_unread of them are UNREAD.
    most_tokens: how long token_ids can become at most.
    num_computed: tokens whose KV lies in the blocks of block_table, once the steps launched so far have run.
    num_confirmed: of these, those of steps that were read.
    num_given: tokens that steps were told to compute so far; more than num_computed if some were guessed.
    num_proven: confirmed tokens that a finite sample has followed.
    num_published: full confirmed blocks, offered to the prefix cache.
    block_keys: keys of the first blocks of token_ids, as many as were needed so far.
    most_found: while it has no blocks, at most so many of these can be found; fewer if some were forgotten.
    is_cacheable: whether its blocks may be entered into the prefix cache.
    num_cached: prompt tokens found in the prefix cache when it was first scheduled.
    awaits_until: when it stops waiting for its beginning to be read from a disk; None before it is asked for.
    num_prompt_counted: prompt tokens ever computed or found; a recomputed one is not counted again.
    scheduled_at, first_token_at, last_token_at: seconds, None before it happens.
    matcher: where the generated tokens stand in the request's grammar; None if it has none.
    adapter: what it is computed with. num_overtaken: see `adapters.admission`.
    acceptance: how often guesses for it came true.
    needs_reading: see `SamplingParams`.
    prompt_logprobs: of the prompt tokens from the second on, as far as they are computed; stays empty unless
        they are asked for.
    """

    __slots__ = (
        "acceptance",
        "adapter",
        "arrival",
        "awaits_until",
        "block_keys",
        "block_table",
        "first_token_at",
        "is_cacheable",
        "last_token_at",
        "matcher",
        "most_found",
        "most_tokens",
        "needs_reading",
        "num_cached",
        "num_computed",
        "num_confirmed",
        "num_given",
        "num_overtaken",
        "num_prompt",
        "num_prompt_counted",
        "num_proven",
        "num_published",
        "num_unread",
        "prompt_logprobs",
        "rank",
        "request",
        "scheduled_at",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        arrival: int,
        served_as_of: float = 0.0,
        matcher: "TokenMatcher | None" = None,
        adapter: Adapter = NO_ADAPTER,
    ) -> None:
        self.request = request
        self.adapter = adapter
        self.num_overtaken = 0
        self.matcher = matcher
        self.acceptance = Acceptance()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.arrival = arrival
        self.rank = (served_as_of, arrival)
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_unread = 0
        self.most_tokens = self.num_prompt + request.sampling.max_tokens
        self.needs_reading = request.sampling.needs_reading
        self.num_cached = 0
        self.num_prompt_counted = 0
        self.block_table: array[int] = array("q")
        self.block_keys: list[bytes] = []
        self.most_found = 0
        self.forget_computed()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet; at least one while the sequence lives."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens of the answer that were read."""
        return len(self.token_ids) - self.num_unread - self.num_prompt

    @property
    def is_ending(self) -> bool:
        """Whether its last token is on its way."""
        return len(self.token_ids) >= self.most_tokens

    @property
    def takes_guesses(self) -> bool:
        """Whether it decodes: all but its last known token is computed, its whole prompt among them."""
        return self.num_computed >= self.num_prompt and self.num_pending == 1

    def forget_computed(self) -> None:
        """Start again: none of the known tokens is computed."""
        self.num_computed = self.num_confirmed = self.num_given = 0
        self.num_proven = self.num_published = 0
        self.is_cacheable = True
        self.awaits_until: float | None = None

    def count_prompt_tokens(self, end: int) -> int:
        """Count the prompt tokens before `end`, as far as they are new; say how many these are."""
        num_new = max(0, min(end, self.num_prompt) - self.num_prompt_counted)
        self.num_prompt_counted += num_new
        return num_new

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Take the entries of the tokens that follow positions start, start + 1, ...

        After a preemption some of them come again; these are left out.
        """
        self.prompt_logprobs += entries[len(self.prompt_logprobs) - start :]

    def expect_token(self) -> None:
        """A step that samples the next token was launched."""
        self.token_ids.append(UNREAD)
        self.num_unread += 1

    def read_token(self, token_id: int, now: float) -> FinishReason | None:
        """Take the next token, read at `now`; say whether, and why, it was the last one."""
        if self.num_unread:
            self.token_ids[-self.num_unread] = token_id
            self.num_unread -= 1
        else:
            self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        if self.matcher is not None:
            reason = self.matcher.advance(token_id)
            if reason is not None:
                return reason
        sampling = self.request.sampling
        # Before min_tokens none of these is ever sampled.
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) - self.num_unread >= self.most_tokens:
            return FinishReason.LENGTH
        return None

    def seconds_per_output_token(self) -> float | None:
        """Mean time between generated tokens; None with fewer than two."""
        if self.first_token_at is None or self.last_token_at is None or self.num_generated < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.num_generated - 1)


def rank_of(sequence: Sequence) -> tuple[float, int]:
    """Who comes first, the lowest."""
    return sequence.rank


def take_out(ranked: list[Sequence], sequence: Sequence) -> bool:
    """Remove a sequence from a list in order of rank; False if it is not in it."""
    position = bisect_left(ranked, sequence.rank, key=rank_of)
    if position == len(ranked) or ranked[position] is not sequence:
        return False
    del ranked[position]
    return True

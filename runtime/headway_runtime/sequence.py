"""The state of one request inside the engine: its tokens, how many are computed, which blocks hold them.

Only the scheduler changes a sequence. There are no phases: a sequence wants its computed tokens to catch up
with its known tokens, be it by a chunk of a prompt, by one decoded token, or again after a preemption.
"""

from array import array

from headway_runtime.request import FinishReason, Request


class Sequence:
    """One accepted request.

    arrival: rank in the order of acceptance; the oldest has the lowest.
    num_computed: tokens whose KV lies in the blocks of block_table.
    num_prompt_counted: prompt tokens that were ever computed; a recomputed one is not counted again.
    scheduled_at, first_token_at, last_token_at: seconds, None before it happens.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "first_token_at",
        "last_token_at",
        "num_computed",
        "num_prompt",
        "num_prompt_counted",
        "request",
        "scheduled_at",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_prompt_counted = 0
        self.block_table: array[int] = array("q")
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet; at least one while the sequence lives."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def count_computed(self, num_tokens: int) -> int:
        """Take over num_tokens computed tokens; say how many are prompt tokens never computed before."""
        self.num_computed += num_tokens
        num_new = max(0, min(self.num_computed, self.num_prompt) - self.num_prompt_counted)
        self.num_prompt_counted += num_new
        return num_new

    def append_token(self, token_id: int, now: float, max_model_len: int) -> FinishReason | None:
        """Take a token sampled at `now`; say whether, and why, it was the last one."""
        self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        sampling = self.request.sampling
        # Before min_tokens none of these is ever sampled.
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated >= sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def seconds_per_output_token(self) -> float | None:
        """Mean time between generated tokens; None with fewer than two."""
        if self.first_token_at is None or self.last_token_at is None or self.num_generated < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.num_generated - 1)

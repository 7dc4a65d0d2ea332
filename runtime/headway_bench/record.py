"""What one request did, as its client saw it; measures nothing itself and sums nothing up.

Times are `time.perf_counter()` seconds. A failure is told by its kind:

    connect        no connection                    disconnected   the connection ended before the answer
    timeout        over the request's time limit    protocol       what came is no HTTP or no event stream
    http_NNN       answered with that status        stream_error   an error event in the stream
    truncated      the stream ended without [DONE] and without a finish reason

`interrupted` is no failure: the user ended the benchmark while the request was under way.
"""

from array import array
from dataclasses import dataclass, field

from headway_bench.answer import CountSource

INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Record:
    """One request. Filled in while it runs; complete once `ended_at` is set."""

    conversation: int
    turn: int
    is_warmup: bool
    due_at: float
    input_tokens_wanted: int | None
    output_tokens_wanted: int
    sent_at: float = 0.0
    ended_at: float = 0.0
    connect_seconds: float | None = None
    token_times: "array[float]" = field(default_factory=lambda: array("d"))
    token_counts: "array[int]" = field(default_factory=lambda: array("L"))
    count_source: CountSource | str = "events"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    status: int = 0
    failure: str = ""
    failure_detail: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer arrived."""
        return self.ended_at > 0 and not self.failure

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as the server counts them, else as its events told."""
        return sum(self.token_counts) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_seconds(self) -> float | None:
        """From sending to the first event with content."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def e2e_seconds(self) -> float:
        """From sending to the end of the answer."""
        return self.ended_at - self.sent_at

    @property
    def lag_seconds(self) -> float:
        """How late this client sent it."""
        return self.sent_at - self.due_at

    @property
    def tpot_seconds(self) -> float | None:
        """Time for each token after those of the first event; None where there is none."""
        if len(self.token_times) < 2:
            return None
        # Tokens without text after the last event (an end marker) took no part of the time between events.
        is_told = self.count_source in ("token_ids", "usage")
        last = sum(self.token_counts) if is_told else self.output_tokens
        later = last - self.token_counts[0]
        if later < 1:
            return None
        return (self.token_times[-1] - self.token_times[0]) / later

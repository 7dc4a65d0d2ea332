"""What the in-process engine gives back for one prompt. Plain values; times are seconds."""

from dataclasses import dataclass

from headway_runtime.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, of several answers the slowest; None for what has not happened.

    queue_seconds: from the call to the first step; prefill_seconds: from there to the first token.
    ttft_seconds: both. e2e_seconds: from the call to the last token, or so far.
    """

    queue_seconds: float | None
    prefill_seconds: float | None
    ttft_seconds: float | None
    e2e_seconds: float


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    token_ids: those the text was made of; the ones behind a stop string are left out.
    finish_reason: "stop", "length" or "error"; None while it goes on. stop_reason: the stop string or the
        stop token (of those asked for) that ended it. error: what went wrong, with "error".
    logprobs: one entry per token, if they were asked for. cumulative_logprob: the sum of the tokens' own.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """All answers to one prompt, so far or complete.

    prompt: its text, None where token ids were given. num_cached_tokens: of the prompt, found in the cache.
    prompt_logprobs: one entry per prompt token, None for the first one, if they were asked for.
    finished: whether every answer has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first answer's."""
        return self.outputs[0].text

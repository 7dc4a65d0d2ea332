"""The answers to one prompt while they come in this process: engine outputs in, values for users out.

Knows the choices of one prompt and nothing of threads, queues or other prompts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway_runtime.choice import Choice, TextRules
from headway_runtime.errors import EngineDeadError, InvalidRequestError
from headway_runtime.generation_output import CompletionOutput, GenerationOutput, Timings
from headway_runtime.request import FinishReason, Request, RequestOutput, TokenLogprobs
from headway_runtime.sampling_params import SamplingParams, shown
from headway_runtime.tokenizer import Vocabulary

# Where the form of an answer is prescribed.
GRAMMAR_FIELDS = ("grammar", "structured_outputs")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, encoded. text: None where token ids were given."""

    request_id: str
    text: str | None
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Answer:
    """One choice, and what is kept of it besides its text. sum_logprobs: only if they were asked for."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.error is not None or self.choice.finish_reason is not None


class Assembly:
    """The answers to one prompt. received_at: `time.monotonic()` at the call."""

    def __init__(
        self,
        prompt: Prompt,
        requests: Sequence[Request],
        params: SamplingParams,
        vocabulary: Vocabulary,
        received_at: float,
    ) -> None:
        self.prompt = prompt
        self.requests = tuple(requests)
        self._params = params
        self._received_at = received_at
        sampling = requests[0].sampling
        rules = TextRules(
            stops=params.stops,
            with_stop=params.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop_reasons=frozenset(params.stop_token_ids or ()),
            special_tokens=not params.skip_special_tokens,
        )
        self._answers = {
            one.request_id: _Answer(Choice(index, one.request_id, vocabulary, rules))
            for index, one in enumerate(requests)
        }
        self._num_open = len(requests)
        self._queue_seconds: float | None = None
        self._prefill_seconds: float | None = None
        self._ttft_seconds: float | None = None
        self._ended_at: float | None = None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_generated(self) -> int:
        return sum(one.choice.num_generated for one in self._answers.values())

    def feed(
        self, request_id: str, event: RequestOutput | InvalidRequestError | EngineDeadError
    ) -> str | None:
        """Take in one event. The request's id, if the engine has to be told that its answer is complete.

        Raises the event, if it is an error that is the caller's or the engine's end; an answer that failed by
        itself ends with its error, and the others go on.
        """
        if isinstance(event, Exception):
            raise event
        answer = self._answers[request_id]
        if answer.has_ended:
            return None
        self._take_times(event)
        if event.finish_reason is FinishReason.ERROR:
            if event.error_param is not None:
                field = event.error_param
                given = shown(getattr(self._params, field, None))
                raise InvalidRequestError(
                    f"{field}={given} cannot be enforced: {event.error}; correct it",
                    param=field,
                    code="invalid_grammar" if field in GRAMMAR_FIELDS else "invalid_value",
                )
            answer.error = event.error or "the engine failed"
            self._end_one()
            return None
        text = answer.choice.feed(event).text
        if self._params.detokenize:
            answer.text += text
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if answer.choice.finish_reason is None:
            return None
        self._end_one()
        return request_id if answer.choice.is_stopped_by_text and event.finish_reason is None else None

    def output(self) -> GenerationOutput:
        """Everything so far."""
        ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        return GenerationOutput(
            request_id=self.prompt.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=tuple(self._completion(one) for one in self._answers.values()),
            finished=self.finished,
            num_cached_tokens=next(iter(self._answers.values())).choice.num_cached_tokens,
            timings=Timings(
                self._queue_seconds, self._prefill_seconds, self._ttft_seconds, ended_at - self._received_at
            ),
            prompt_logprobs=self._prompt_logprobs,
        )

    def _completion(self, answer: _Answer) -> CompletionOutput:
        choice = answer.choice
        # A stop string may have been found before the last tokens of an output.
        count = choice.num_generated
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=choice.index,
            text=answer.text,
            token_ids=tuple(answer.token_ids[:count]),
            finish_reason="error" if answer.error is not None else choice.finish_reason,
            stop_reason=choice.stop_reason,
            error=answer.error,
            logprobs=tuple(answer.logprobs[:count]) if wants_logprobs else None,
            cumulative_logprob=choice.sum_logprobs if wants_logprobs else None,
        )

    def _take_times(self, event: RequestOutput) -> None:
        if event.queue_seconds is None:
            return
        self._queue_seconds = max(self._queue_seconds or 0.0, event.queue_seconds)
        if event.prefill_seconds is not None:
            self._prefill_seconds = max(self._prefill_seconds or 0.0, event.prefill_seconds)
            ttft_seconds = event.queue_seconds + event.prefill_seconds
            self._ttft_seconds = max(self._ttft_seconds or 0.0, ttft_seconds)

    def _end_one(self) -> None:
        self._num_open -= 1
        if self.finished:
            self._ended_at = time.monotonic()

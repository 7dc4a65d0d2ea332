"""The body of `/v1/completions`, and what chats share with it: what is accepted, and what is refused by name.

A field is here only if it works, or if it asks for nothing. Fields that others serve and this server does
not are in `refused_fields`. Pydantic models check types, ranges and what must agree; nothing here knows the
model, its tokenizer or the engine.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from headway_runtime.request import MAX_PRIORITY, MAX_SALT_CHARACTERS, Grammar
from headway_runtime.server.body import StrictBody
from headway_runtime.server.refused_fields import NEUTRAL_FIELDS, REFUSALS
from headway_runtime.server.structured_fields import StructuredFields, grammar_of

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1

# Tokens that may be asked for at most; an answer is clipped to the context anyway.
MAX_TOKENS = 2**31 - 1


class StreamOptions(StrictBody):
    """What a stream carries besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _stats_are_usage(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats is only allowed with include_usage=true")
        return self


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class GenerationBody(StructuredFields):
    """What both endpoints share."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL_FIELDS
    refusals: ClassVar[Mapping[str, str]] = REFUSALS

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Headway's own: `usage.headway` says where the time went.
    return_timings: bool | None = None
    # -1: as many as leave room for max_tokens.
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/=+-]{1,128}$")] | None = None
    # Accepted because they ask nothing of the model: who asks, and what the client notes for itself.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _shared_fields_agree(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        if self.return_timings and self.stream and not self.wants_usage_chunk:
            raise ValueError("return_timings with stream=true needs stream_options.include_usage=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is only allowed with stream=false")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side is only allowed with truncate_prompt_tokens")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to match."""
        return grammar_of(self)

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def tokens_wanted(self) -> int | None:
        """The bound on generated tokens; None: as many as fit."""
        return self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions. The prompt is a text, several, a list of token ids, or several of those."""

    # Each form gives up at the first item that is not of it: to note of 130,000 token ids that they are no
    # texts, one by one, would hold up every stream for 40 ms.
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    # 0, which needs echo: nothing is generated, and the prompt comes back with its log-probabilities.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 is only allowed with echo=true; ask for at least one token")
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise ValueError(f"best_of={self.best_of} is less than n={self.n or 1}; raise it")
            if self.stream and self.best_of > (self.n or 1):
                raise ValueError("best_of greater than n is only allowed with stream=false")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def tokens_wanted(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]

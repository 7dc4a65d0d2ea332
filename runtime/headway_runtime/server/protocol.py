"""The body of `/v1/completions`, and what chats share with it: what is accepted, and what is refused by name.

A field is here only if it works, or if it asks for nothing. Fields that others serve and this server does
not are in `refused_fields`. Pydantic models check types, ranges and what must agree; nothing here knows the
model, its tokenizer or the engine.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from headway_runtime.request import Grammar
from headway_runtime.sampling_params import MAX_CHOICES, MAX_TOKENS
from headway_runtime.server.body import FIRST_FAULT, WHOLE, FieldError, StrictBody
from headway_runtime.server.refused_fields import NEUTRAL_FIELDS, REFUSALS
from headway_runtime.server.shared_fields import SharedFields, TokenId
from headway_runtime.server.structured_fields import NO_STRUCTURAL_TAG, StructuredFields, grammar_of


class StreamOptions(StrictBody):
    """What a stream carries besides its text."""

    # OpenAI's padding against those who watch a stream's lengths, which is not served and may be declined.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _stats_are_usage(self) -> "StreamOptions":
        if self.continuous_usage_stats and self.include_usage is False:
            raise FieldError(
                "continuous_usage_stats",
                "asks for usage, which include_usage=false declines; set that to true, or leave it out",
            )
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a last chunk has the usage. Whoever wants it with every chunk need not say so again."""
        return bool(self.include_usage or self.continuous_usage_stats)


class GenerationBody(SharedFields, StructuredFields):
    """What both completion endpoints share."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL_FIELDS
    refusals: ClassVar[Mapping[str, str]] = REFUSALS
    refused_types: ClassVar[Mapping[str, str]] = {"structural_tag": NO_STRUCTURAL_TAG}

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_agree(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options", "is only allowed with stream=true; set stream, or leave the field out"
            )
        if self.return_timings and self.stream and not self.wants_usage_chunk:
            raise FieldError(
                "return_timings", "with stream=true needs stream_options.include_usage=true; set that, too"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError(
                "prompt_logprobs", "is only allowed with stream=false; ask without stream, or leave it out"
            )
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.wants_usage

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

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
        | Annotated[list[str], FIRST_FAULT]
        | Annotated[list[TokenId], FIRST_FAULT]
        | Annotated[list[Annotated[list[TokenId], FIRST_FAULT]], FIRST_FAULT]
    )
    # 0, which needs echo: nothing is generated, and the prompt comes back with its log-probabilities.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise FieldError(
                "max_tokens",
                "is only allowed with echo=true; ask for at least one token",
                "integer_below_min_value",
            )
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise FieldError("best_of", f"is less than n={self.n or 1}; raise it, or lower n")
            if self.stream and self.best_of > (self.n or 1):
                raise FieldError(
                    "best_of",
                    f"is more than n={self.n or 1}, which is only allowed with stream=false; lower it",
                )
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

"""The fields that all endpoints share which generate, OpenAI's and vLLM's: sampling, truncation, who asks.

A field is here only if it works, or if it asks for nothing. Knows no model and no tokenizer.
"""

import sys
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headway_runtime.request import LARGEST_PRIORITY, MAX_SALT_CHARACTERS, SMALLEST_PRIORITY
from headway_runtime.sampling_params import (
    MAX_BAD_WORDS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKENS,
)
from headway_runtime.server.body import FIRST_FAULT, WHOLE, AtMost, FieldError
from headway_runtime.server.structured_fields import OutputsField

# As many as there is any sense in; each may be wrong, and its fault told.
MAX_BIASES = 2**16
MAX_NOTES = 1024

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class SharedFields(OutputsField):
    """A part of other bodies."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=sys.float_info.max)] | None = None
    logit_bias: Annotated[dict[str, Bias], AtMost(MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1), FIRST_FAULT] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS), FIRST_FAULT] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED), WHOLE] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS), FIRST_FAULT] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST_FAULT] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Headway's own: `usage.headway` says where the time went.
    return_timings: bool | None = None
    # -1: as many as leave room for the answer.
    truncate_prompt_tokens: (
        Annotated[Literal[-1], WHOLE] | Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=SMALLEST_PRIORITY, le=LARGEST_PRIORITY), WHOLE] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/=+-]{1,128}$")] | None = None
    # Accepted because they ask nothing of the model: who asks, and what the client notes for itself.
    user: str | None = None
    metadata: Annotated[dict[str, str], AtMost(MAX_NOTES)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _truncation_agrees(self) -> "SharedFields":
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise FieldError("truncation_side", "is only allowed with truncate_prompt_tokens; send both")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

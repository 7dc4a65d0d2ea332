"""Speculative decoding, as a service asks for it."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import SpecModel, rules
from headway_operator.spec.source import Source

DRAFT_RULE = "self.method == 'draft_model' ? has(self.draft) : !has(self.draft)"
DRAFT_MESSAGE = (
    "method draft_model needs a draft and method ngram has none: set speculative.draft.source, or set "
    "speculative.method to ngram and remove speculative.draft"
)
# Bounds and defaults as the engine has them (`speculative_options`).
LONGEST_LOOKUP, DEFAULT_LOOKUP_MAX = 32, 5
LOOKUP_METHOD_RULE = "self.method == 'ngram' || (!has(self.promptLookupMin) && !has(self.promptLookupMax))"
LOOKUP_METHOD_MESSAGE = (
    "promptLookupMin and promptLookupMax are for method ngram: remove them, or set method to ngram"
)
LOOKUP_ORDER_RULE = (
    "!has(self.promptLookupMin) || "
    f"self.promptLookupMin <= (has(self.promptLookupMax) ? self.promptLookupMax : {DEFAULT_LOOKUP_MAX})"
)
LookupTokens = Annotated[int, Field(ge=1, le=LONGEST_LOOKUP)]
LOOKUP_ORDER_MESSAGE = (
    f"promptLookupMin must not exceed promptLookupMax, {DEFAULT_LOOKUP_MAX} where it is left out: lower "
    "speculative.promptLookupMin or raise speculative.promptLookupMax"
)


class Draft(SpecModel):
    """The small model whose guesses the served model checks."""

    source: Source
    """Where the draft's weights lie; same forms as model.source, opened by model.credentialsSecretRef, too.
    No default."""


class Speculative(SpecModel):
    """Speculative decoding: tokens are guessed ahead and checked together. It changes no answer."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (DRAFT_RULE, DRAFT_MESSAGE),
            (LOOKUP_METHOD_RULE, LOOKUP_METHOD_MESSAGE),
            (LOOKUP_ORDER_RULE, LOOKUP_ORDER_MESSAGE),
        )
    )
    method: Literal["draft_model", "ngram"] = "draft_model"
    """Who guesses: a smaller model, or what followed the same tokens earlier in prompt and answer. Default
    draft_model."""
    draft: Draft | None = None
    """The draft model, for method draft_model. Default: none."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Most tokens guessed per step for each sequence (1 to 16). Default 4."""
    prompt_lookup_max: LookupTokens | None = None
    """Most last tokens that method ngram looks for earlier on (1 to 32); the longest match counts. Default
    5."""
    prompt_lookup_min: LookupTokens | None = None
    """Fewest last tokens that make a match (1 to 32). Default: 2, or promptLookupMax if that is less."""
    adaptive: bool = True
    """Whether fewer tokens are guessed where that is faster, and none where guessing loses. Default true."""

    @model_validator(mode="after")
    def _has_who_guesses(self) -> Self:
        if (self.method == "draft_model") != (self.draft is not None):
            raise ValueError(DRAFT_MESSAGE)
        return self

    @model_validator(mode="after")
    def _looks_up_what_can_be(self) -> Self:
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if self.method != "ngram" and (shortest, longest) != (None, None):
            raise ValueError(LOOKUP_METHOD_MESSAGE)
        if shortest is not None and shortest > (longest or DEFAULT_LOOKUP_MAX):
            raise ValueError(f"{LOOKUP_ORDER_MESSAGE}; got {shortest} and {longest}")
        return self

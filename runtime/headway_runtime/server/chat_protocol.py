"""The body of `/v1/chat/completions`: what is accepted, and what is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from headway_runtime.request import Grammar
from headway_runtime.sampling_params import MAX_TOKENS
from headway_runtime.server.body import WHOLE, FieldError
from headway_runtime.server.protocol import GenerationBody
from headway_runtime.server.refused_fields import REFUSALS
from headway_runtime.server.template_fields import Messages, ReasoningEffort, TemplateFields
from headway_runtime.server.tool_fields import ToolFields
from headway_runtime.server.tool_grammar import forced_call_grammar

_NO_MEDIA = "this server's models read text; send parts of type 'text'"


class ChatBody(TemplateFields, ToolFields, GenerationBody):
    """POST /v1/chat/completions."""

    refusals: ClassVar[Mapping[str, str]] = REFUSALS
    refused_types: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused_types,
        **dict.fromkeys(("file", "image_url", "input_audio", "refusal", "video_url"), _NO_MEDIA),
    }

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = None
    reasoning_effort: ReasoningEffort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "is only allowed with logprobs=true; set that, too")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise FieldError(
                "max_tokens",
                f"differs from max_completion_tokens={self.max_completion_tokens}; send one of them",
            )
        if self.must_call and self.structured_outputs is not None:
            raise FieldError(
                "structured_outputs",
                "prescribes the answer, as tool_choice does; send one of them",
                "mutually_exclusive_parameters",
            )
        return self

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """As vLLM has it: an effort switches thinking on or off, too, unless the request does that itself."""
        given = super().template_variables
        if self.reasoning_effort is None:
            return given
        thinks = {"enable_thinking": self.reasoning_effort != "none"}
        return {**thinks, **given, "reasoning_effort": self.reasoning_effort}

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def grammar(self) -> Grammar | None:
        """A call that has to be made comes before the form of an answer, which it replaces."""
        return forced_call_grammar(self) or super().grammar

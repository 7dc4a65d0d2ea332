"""The body of `/v1/responses`, in its text form: what is accepted, and what is refused by name.

The server keeps no state: a conversation is sent whole, as input items, and nothing is stored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from headway_runtime.sampling_params import MAX_TOKENS
from headway_runtime.server.body import FIRST_FAULT, WHOLE, FieldError, JsonObject, StrictBody
from headway_runtime.server.refused_fields import NEUTRAL_FIELDS, REFUSALS
from headway_runtime.server.shared_fields import SharedFields
from headway_runtime.server.template_fields import ReasoningEffort, TemplateOptions
from headway_runtime.server.tool_fields import MAX_TOOLS, ToolName, check_tool_choice, check_tool_names

LOGPROBS = "message.output_text.logprobs"
_STATELESS = "this server keeps no responses; send the whole conversation as input"
_OF_VLLM = (
    "ec_transfer_params",
    "include_reasoning",
    "kv_transfer_params",
    "media_io_kwargs",
    "mm_payload",
    "mm_processor_kwargs",
    "return_mm_kwargs",
    "session_id",
    "vllm_xargs",
    "watermarking",
)
_NO_MEDIA = "this server's models read text; send parts of type 'input_text'"


class ItemText(StrictBody):
    """A part of a message: what a user sent, or what came back from a model before."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],)}

    type: Literal["input_text", "output_text"]
    text: str
    # Of a text that came out of a response with them; what the model said then is not asked again.
    logprobs: list[Any] | None = None


class MessageItem(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"phase": ()}

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Annotated[list[ItemText], FIRST_FAULT]
    # As the item was when it came out of a response.
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class CallItem(StrictBody):
    """A call that a model made. arguments: JSON, as the model wrote it."""

    # `async_` is how the `openai` client dumps `async`.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("async", "async_"), (False,)),
        **dict.fromkeys(("caller", "namespace", "parsed_arguments"), ()),
    }

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class CallOutputItem(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = dict.fromkeys(("caller", "namespace"), ())

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ItemText], FIRST_FAULT]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def _type_of_item(item: Any) -> Any:
    """What is no object, or says nothing usable of its type, is looked at as a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_type_of_item),
]


class FunctionTool(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("async", "defer_loading"), (False,)),
        **dict.fromkeys(("allowed_callers", "output_schema"), ()),
    }

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(StrictBody):
    type: Literal["function"]
    name: str


class TextFormat(StrictBody):
    """As `response_format` of chats, in one level."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    wanted: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_has_its_type(self) -> "TextFormat":
        for field, value in (("name", self.name), ("schema", self.wanted)):
            if (self.type == "json_schema") != (value is not None):
                raise FieldError(
                    field,
                    "is missing; type 'json_schema' needs it"
                    if value is None
                    else f"is only allowed with type 'json_schema', which here is {self.type!r}; change it",
                    "missing_required_parameter" if value is None else "invalid_value",
                )
        return self


class TextOptions(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningOptions(StrictBody):
    """How much the model is to think, for templates that know it. What it thinks is part of the answer."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"context": ("auto",), "mode": ("standard",)}
    refusals: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("generate_summary", "summary"), "what the model thinks is part of its text"
    )

    effort: ReasoningEffort | None = None


class ResponsesBody(SharedFields, TemplateOptions):
    """POST /v1/responses."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
        # What vLLM's clients may say there.
        "enable_response_messages": (False,),
        "previous_input_messages": ([],),
        **{name: NEUTRAL_FIELDS[name] for name in _OF_VLLM},
    }
    refused_types: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("input_image", "input_file", "input_audio", "image_url", "file"), _NO_MEDIA),
        "item_reference": _STATELESS,
        "reasoning": "leave such items out",
    }
    refusals: ClassVar[Mapping[str, str]] = {
        "background": "wait for the answer, or stream it",
        "conversation": _STATELESS,
        "previous_response_id": _STATELESS,
        "prompt": "send the text of the prompt as instructions and input",
        "response_format": "use text.format",
        "messages": "use input",
        "best_of": "it belongs to /v1/completions; send the request several times",
        "echo": "it belongs to /v1/completions",
        "logprobs": f"use include=[{LOGPROBS!r}] and top_logprobs",
        "max_completion_tokens": "use max_output_tokens",
        "max_tokens": "use max_output_tokens",
        "max_tool_calls": "send parallel_tool_calls=false for one call at most",
        "n": "a response has one answer; send the request several times, or use /v1/chat/completions",
        "prompt_cache_options": REFUSALS["prompt_cache_options"],
        "prompt_logprobs": "use /v1/chat/completions or /v1/completions",
        "return_token_ids": "use /v1/chat/completions or /v1/completions",
        "stream_options": "the last event of a stream has the usage in any case",
        "suffix": "it belongs to /v1/completions",
        "truncation": "shorten the input, or send truncate_prompt_tokens",
        "previous_input_messages": _STATELESS,
        **{name: REFUSALS[name] for name in _OF_VLLM if name in REFUSALS},
        **{name: remedy for name, remedy in REFUSALS.items() if name.startswith("guided_")},
    }

    input: str | Annotated[list[InputItem], Field(min_length=1), FIRST_FAULT]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], FIRST_FAULT]
        | None
    ) = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _tools_fit_the_choice(self) -> "ResponsesBody":
        names = [tool.name for tool in self.tools or ()]
        check_tool_names(names)
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None
        check_tool_choice(names, named, must_call=self.tool_choice == "required")
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> "ResponsesBody":
        if self.top_logprobs and not self.wants_logprobs:
            raise FieldError("top_logprobs", f"is only allowed with include=[{LOGPROBS!r}]; send both")
        is_free = self.text is None or self.text.format is None or self.text.format.type == "text"
        if self.structured_outputs is not None and not is_free:
            raise FieldError(
                "structured_outputs",
                "prescribes the answer, as text.format does; send one of them",
                "mutually_exclusive_parameters",
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

"""The body of `/v1/responses`, in its text form: what is accepted, and what is refused by name.

The server keeps no state: a conversation is sent whole, as input items, and nothing is stored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from headway_runtime.request import MAX_PRIORITY, MAX_SALT_CHARACTERS
from headway_runtime.server.body import FieldError, StrictBody
from headway_runtime.server.protocol import (
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOPS,
    MAX_TOKENS,
    Bias,
    Penalty,
    StopString,
    TokenId,
)
from headway_runtime.server.tool_fields import MAX_TOOLS, ToolName

LOGPROBS = "message.output_text.logprobs"
_STATELESS = "this server keeps no responses; send the whole conversation as input"
_NO_MEDIA = "this server's models read text; send parts of type 'input_text'"


class ItemText(StrictBody):
    """A part of a message: what a user sent, or what came back from a model before."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text"]
    text: str


class MessageItem(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"phase": ()}

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[ItemText]
    # As the item was when it came out of a response.
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class CallItem(StrictBody):
    """A call that a model made. arguments: JSON, as the model wrote it."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"parsed_arguments": (), "namespace": ()}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class CallOutputItem(StrictBody):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemText]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def _type_of_item(item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in ("function_call", "function_call_output") else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_type_of_item),
]


class FunctionTool(StrictBody):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(StrictBody):
    type: Literal["function"]
    name: str


class TextFormat(StrictBody):
    """As `response_format` of chats, in one level."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    wanted: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_has_its_type(self) -> "TextFormat":
        for field, value in (("name", self.name), ("schema", self.wanted)):
            if (self.type == "json_schema") != (value is not None):
                raise FieldError(field, "belongs to type 'json_schema', and that needs it")
        return self


class TextOptions(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponsesBody(StrictBody):
    """POST /v1/responses."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None}),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
    }
    refusals: ClassVar[Mapping[str, str]] = {
        "background": "wait for the answer, or stream it",
        "conversation": _STATELESS,
        "input_image": _NO_MEDIA,
        "image_url": _NO_MEDIA,
        "input_file": _NO_MEDIA,
        "file_id": _NO_MEDIA,
        "file_data": _NO_MEDIA,
        "previous_response_id": _STATELESS,
        "prompt": "send the text of the prompt as instructions and input",
        "reasoning": "some templates have a switch; send that as chat_template_kwargs",
        "response_format": "use text.format",
        "messages": "use input",
        "max_tokens": "use max_output_tokens",
        "truncation": "shorten the input",
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    # vLLM's, as for chats.
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted because they ask nothing of the model. What is not stored says store: false.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _tools_fit_the_choice(self) -> "ResponsesBody":
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldError("tools", "defines a name more than once; name each tool once")
        if isinstance(self.tool_choice, NamedFunction) and self.tool_choice.name not in names:
            raise FieldError("tool_choice", f"names {self.tool_choice.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "asks for a call, but there are no tools; send tools")
        if self.top_logprobs and not self.wants_logprobs:
            raise FieldError("top_logprobs", f"is only allowed with include=[{LOGPROBS!r}]")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

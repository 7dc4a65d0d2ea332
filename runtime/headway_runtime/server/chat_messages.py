"""The messages of a chat: roles, contents, calls of tools, and what of them reaches the model's template."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headway_runtime.server.body import FIRST_FAULT, FieldError, StrictBody

# What clients send back of an assistant's message that they were given.
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "parsed": (),
    "refusal": (),
}


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class FunctionCall(StrictBody):
    """What an assistant called. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object, which templates write in their own way; as text, if they are none."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"index": tuple(range(128))}

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


class ChatMessage(StrictBody):
    """One message; `developer` is today's word for `system` and reaches the template as that.

    reasoning, reasoning_content: two names for what an assistant thought before it answered.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FIRST_FAULT] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128), FIRST_FAULT] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> "ChatMessage":
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise FieldError(
                    field,
                    f"is only allowed with role 'assistant'; this message's is {self.role!r}, leave it out",
                )
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError(
                "tool_call_id",
                "is missing; role 'tool' answers a call, send the id of that",
                "missing_required_parameter",
            )
        if self.role != "tool" and self.tool_call_id is not None:
            raise FieldError(
                "tool_call_id",
                f"is only allowed with role 'tool'; this message's is {self.role!r}, leave it out",
            )
        # An answer that was cut before it began has no content, and comes back so.
        if self.content is None and self.role != "assistant":
            raise FieldError(
                "content",
                "is missing; send text, which only an assistant's message may leave out",
                "missing_required_parameter",
            )
        return self

    @property
    def text(self) -> str:
        """Text parts are joined by line breaks; no content is none."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """What chat templates read; what was not sent is left out, as they ask whether it is there."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message

"""The messages of a chat: roles, contents, and what of them reaches the model's template."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from headway_runtime.server.body import StrictBody

# What the openai client sends back of an assistant's message that it was given.
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class ChatMessage(StrictBody):
    """One message; `developer` is today's word for `system` and reaches the template as that."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """What chat templates read. Text parts are joined by line breaks."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}

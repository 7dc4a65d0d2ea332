"""The bodies of `/tokenize` and `/detokenize`."""

from typing import Annotated

from pydantic import Field, model_validator

from headway_runtime.server.body import StrictBody
from headway_runtime.server.chat_messages import ChatMessage
from headway_runtime.server.protocol import TokenId


class TokenizeBody(StrictBody):
    """POST /tokenize: a prompt, or messages as the chat endpoint would see them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        if self.messages is None and self.add_generation_prompt is not None:
            raise ValueError("add_generation_prompt is only allowed with messages")
        return self


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]

"""The bodies of `/tokenize` and `/detokenize`."""

from pydantic import model_validator

from headway_runtime.server.body import StrictBody
from headway_runtime.server.protocol import TokenId
from headway_runtime.server.template_fields import TemplateFields


class TokenizeBody(TemplateFields):
    """POST /tokenize: a prompt, or messages as the chat endpoint would see them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        if self.messages is None:
            given = [name for name in TemplateFields.model_fields if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} is only allowed with messages")
        return self


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]

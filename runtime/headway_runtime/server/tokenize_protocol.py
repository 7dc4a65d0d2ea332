"""The bodies of `/tokenize` and `/detokenize`."""

from typing import Annotated

from pydantic import model_validator

from headway_runtime.server.body import FIRST_FAULT, FieldError, StrictBody
from headway_runtime.server.shared_fields import TokenId
from headway_runtime.server.template_fields import TemplateFields


class TokenizeBody(TemplateFields):
    """POST /tokenize: a prompt, or messages as the chat endpoint would see them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if self.prompt is None and self.messages is None:
            raise FieldError(
                "prompt",
                "is missing; send either prompt or messages",
                "missing_mutually_exclusive_parameters",
            )
        if self.prompt is not None and self.messages is not None:
            raise FieldError("messages", "excludes prompt; send one of them", "mutually_exclusive_parameters")
        if self.messages is None:
            given = [name for name in TemplateFields.model_fields if getattr(self, name) is not None]
            if given:
                raise FieldError(given[0], "is only allowed with messages; leave it out, or send messages")
        return self


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST_FAULT]

"""The fields of a body that a chat template reads, and the prompt that comes of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from headway_runtime.chat import RESERVED_NAMES, ChatTemplate, cut_after
from headway_runtime.errors import ConfigError, InvalidRequestError
from headway_runtime.sampling_params import shown
from headway_runtime.server.body import FIRST_FAULT, AtMost, FieldError, JsonObject, StrictBody
from headway_runtime.server.chat_messages import ChatMessage
from headway_runtime.server.shared_fields import MAX_NOTES
from headway_runtime.server.tool_fields import OfferedTools

Messages = Annotated[list[ChatMessage], Field(min_length=1), FIRST_FAULT]
# How much a model is to think before it answers: OpenAI's word and values, for templates that know it.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ModelOfTemplates(Protocol):
    """What of a served model it takes. trusts_request_templates: as the operator of the server says."""

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def trusts_request_templates(self) -> bool: ...

    @property
    def template_variables(self) -> Mapping[str, str]: ...


class TemplateOptions(StrictBody):
    """A part of other bodies: what a template is given besides messages and tools."""

    documents: Annotated[list[Annotated[dict[str, str], AtMost(MAX_NOTES)]], FIRST_FAULT] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _template_options_agree(self) -> "TemplateOptions":
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message",
                "excludes add_generation_prompt=true; send one of them",
                "mutually_exclusive_parameters",
            )
        if taken := RESERVED_NAMES & (self.chat_template_kwargs or {}).keys():
            raise FieldError(
                "chat_template_kwargs", f"sets {min(taken)!r}, which is a field of its own; use that"
            )
        return self


class TemplateFields(TemplateOptions, OfferedTools):
    """A part of other bodies."""

    messages: Messages | None = None

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """What the template is told besides."""
        return self.chat_template_kwargs or {}

    @model_validator(mode="after")
    def _last_message_can_be_continued(self) -> "TemplateFields":
        if not (self.continue_final_message and self.messages):
            return self
        final = self.messages[-1]
        if final.role != "assistant":
            raise FieldError(
                "continue_final_message",
                f"needs a final message of role 'assistant', this one's role is {final.role!r}; add what "
                "the answer begins with as an assistant's message, or leave the field out",
            )
        if not final.text.strip():
            raise FieldError(
                "continue_final_message",
                "needs a final message with text to continue; send one, or leave it out",
            )
        return self


def render_prompt(body: TemplateFields, model: ModelOfTemplates) -> str:
    """The text that the model is to go on with. InvalidRequestError for messages that cannot be rendered."""
    assert body.messages, "the body was checked"
    continues = bool(body.continue_final_message)
    text = _template_of(body, model).render(
        [message.for_template() for message in body.messages],
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        tools=[tool.for_template() for tool in body.tools] if body.tools else None,
        documents=body.documents,
        variables=body.template_variables,
    )
    return cut_after(text, body.messages[-1].text) if continues else text


def _template_of(body: TemplateFields, model: ModelOfTemplates) -> ChatTemplate:
    if body.chat_template is not None:
        if not model.trusts_request_templates:
            raise InvalidRequestError(
                "chat_template: templates in requests are not trusted here; leave the field out, or start "
                "the server with --trust-request-chat-template",
                param="chat_template",
            )
        try:
            return ChatTemplate(body.chat_template, model.template_variables)
        except ConfigError as error:
            given = shown(body.chat_template)
            raise InvalidRequestError(f"chat_template={given}: {error}", param="chat_template") from error
    if model.chat_template is None:
        raise InvalidRequestError(
            "messages: this model has no chat template; use /v1/completions, or start the server with "
            "--chat-template",
            param="messages",
        )
    return model.chat_template

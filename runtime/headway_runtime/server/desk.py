"""What it takes to read a body: the model as the HTTP side knows it, and the names that it goes by.

The HTTP process has one, and so has each process that reads large bodies for it. Knows no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from headway_runtime.chat import ChatTemplate, load_chat_template
from headway_runtime.sampling_params import shown
from headway_runtime.server.body import StrictBody
from headway_runtime.server.chat_options import parser_name
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.options import ServeOptions
from headway_runtime.server.prompts import ServedModel
from headway_runtime.server.tool_calls.choose import FORMATS, ToolCallFormat
from headway_runtime.server.tool_fields import FunctionDefinition, OfferedTools, Tool
from headway_runtime.tokenizer import Tokenizer

# Fields of bodies, of any size, that are of no further use once there are engine requests.
SPENT_FIELDS = (
    "allowed_token_ids",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "logit_bias",
    "messages",
    "metadata",
    "prompt",
    "response_format",
    "structured_outputs",
)

AnyBody = TypeVar("AnyBody", bound=StrictBody)


class Desk(Protocol):
    """What functions that read bodies are given."""

    def model(self) -> ServedModel: ...
    def model_for(self, wanted: str | None) -> ServedModel: ...
    def served_name(self, wanted: str | None) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is read of the model's folder."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_calls: ToolCallFormat | None


def load_model_files(options: ServeOptions) -> ModelFiles:
    """ConfigError if one of them is not usable."""
    folder = Path(options.engine.model_path)
    tokenizer = Tokenizer(folder)
    given = options.chat.chat_template
    template = load_chat_template(
        folder, tokenizer.config, tokenizer.special_tokens, None if given is None else Path(given)
    )
    name = parser_name(options.chat, None if template is None else template.source_with_tools)
    return ModelFiles(tokenizer, template, None if name is None else FORMATS[name])


def served_model(
    files: ModelFiles, options: ServeOptions, max_model_len: int, num_kv_tokens: int
) -> ServedModel:
    """The model, once the engine has told how long a sequence may be."""
    return ServedModel(
        tokenizer=files.tokenizer,
        chat_template=files.chat_template,
        vocab_size=options.vocab_size,
        max_model_len=max_model_len,
        num_kv_tokens=num_kv_tokens,
        max_waiting=options.engine.max_waiting,
        tool_calls=files.tool_calls,
        trusts_request_templates=options.chat.trust_request_chat_template,
        defaults=options.engine.defaults,
        max_logprobs=options.engine.max_logprobs,
    )


def with_adapter(model: ServedModel, wanted: str | None, served_names: Sequence[str]) -> ServedModel:
    """The model, for a request that names it, or one of its adapters. The name has been checked."""
    if wanted is None or wanted in served_names:
        return model
    return replace(model, adapter=wanted)


def name_of(names: Sequence[str], wanted: str | None) -> str:
    """The name that an answer carries. 404 for a model that is not among `names`."""
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise HttpError(
            404,
            f"model={shown(wanted)} is not served here; use {' or '.join(map(repr, names))}",
            param="model",
            code="model_not_found",
        )
    return wanted


def without_spent(body: AnyBody) -> AnyBody:
    """A body that has been read, without what may be megabytes of it. Of tools the names are left."""
    update: dict[str, object] = dict.fromkeys(one for one in SPENT_FIELDS if one in type(body).model_fields)
    if isinstance(body, OfferedTools) and body.tools:
        update["tools"] = [
            Tool(type="function", function=FunctionDefinition(name=name)) for name in body.tool_names
        ]
    return body.model_copy(update=update)

"""Chat messages to the prompt text that a model was trained on, by the model's own Jinja template.

The template comes with the model, so it runs in Jinja's sandbox: it can change nothing and reach nothing
but what it is given. Knows nothing of tokens or HTTP.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headway_runtime.errors import ConfigError, InvalidRequestError
from headway_runtime.tokenizer import read_json_file

Message = Mapping[str, Any]
# What whoever renders gives to templates itself: no variable of these names is taken from a user.
RESERVED_NAMES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tools"}
)


class ChatTemplate:
    """A compiled template, and for chats with tools maybe another one."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], source_with_tools: str | None = None
    ) -> None:
        """The sources are the templates' texts. ConfigError if one is not valid Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._template_with_tools = (
                self._template if source_with_tools is None else environment.from_string(source_with_tools)
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"chat template: not valid Jinja ({error}); correct the model's template"
            ) from error
        # The one that says how the model calls tools.
        self.source_with_tools = source if source_with_tools is None else source_with_tools
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt, up to where the assistant begins to speak, or without its cue to.

        variables: what else this template knows, such as enable_thinking.
        InvalidRequestError, with the template's own words, for messages that it refuses.
        """
        try:
            template = self._template_with_tools if tools else self._template
            return template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                    "documents": documents,
                }
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            ZeroDivisionError,
            OverflowError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them ({error}); send what it wants",
                param="messages",
            ) from error


def load_chat_template(
    model_path: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    given: Path | None = None,
) -> ChatTemplate | None:
    """The file that was given, or the model's own template.

    That is chat_template.jinja, else tokenizer_config.json's, else that of chat_template.json, where
    processors kept it once. Of several in one file it is "default", and for chats with tools "tool_use".
    ConfigError for a file that cannot be read.
    """
    path = given or model_path / "chat_template.jinja"
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
    except (OSError, UnicodeDecodeError) as error:
        if given is not None or not isinstance(error, FileNotFoundError):
            raise ConfigError(f"{path}: cannot be read ({error}); give a readable template") from error
    return _template_in(tokenizer_config, special_tokens) or _template_in(
        read_json_file(model_path / "chat_template.json"), special_tokens
    )


def _template_in(config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """That of a configuration's field `chat_template`, if it has one."""
    source, with_tools = config.get("chat_template"), None
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, special_tokens, with_tools if isinstance(with_tools, str) else None)


def cut_after(text: str, final: str) -> str:
    """A chat's prompt up to the end of its final message, without what the template closes that with."""
    # Templates may take white space off a message's ends.
    for wanted in (final, final.rstrip(), final.strip()):
        index = text.rfind(wanted)
        if index >= 0:
            return text[: index + len(wanted)]
    raise InvalidRequestError(
        "continue_final_message: the model's chat template does not write the final message as it is; "
        "leave the field out",
        param="continue_final_message",
    )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001 - the filter's signature, as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return time.strftime(layout)

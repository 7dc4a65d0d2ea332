"""The flags of chats: the template, and how a model's tool calls are read. Named as vLLM names them."""

import argparse
from dataclasses import dataclass

from headway_runtime.errors import ConfigError
from headway_runtime.server.tool_calls.choose import FORMATS, detect_format


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """See the flags of the same names. enable_auto_tool_choice: None: if it is known how to read calls."""

    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool | None = None
    tool_call_parser: str | None = None


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--chat-template", metavar="PATH", help="a Jinja file (default: the model's own template)")
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring templates, which can keep the server busy for as long as they like",
    )
    add(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        help="let the model decide to call tools (default: if there is a parser for its calls)",
    )
    add("--tool-call-parser", choices=sorted(FORMATS), help="default: found by the model's chat template")


def chat_options(arguments: argparse.Namespace) -> ChatOptions:
    """The flags' values."""
    return ChatOptions(
        chat_template=arguments.chat_template,
        trust_request_chat_template=arguments.trust_request_chat_template,
        enable_auto_tool_choice=arguments.enable_auto_tool_choice,
        tool_call_parser=arguments.tool_call_parser,
    )


def parser_name(options: ChatOptions, template: str | None) -> str | None:
    """The parser of a model with this template; None: its calls are not read. ConfigError if they must be."""
    if options.enable_auto_tool_choice is False:
        return None
    name = options.tool_call_parser or (None if template is None else detect_format(template))
    if name is None and options.enable_auto_tool_choice:
        raise ConfigError(
            "--enable-auto-tool-choice: the model's chat template does not tell how it writes calls; "
            f"give --tool-call-parser, one of {', '.join(sorted(FORMATS))}"
        )
    return name

"""A body of `/v1/responses` as the chat that it comes to."""

import re
from typing import Any

from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import check_body
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.responses_endpoint_protocol import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    InputItem,
    ItemText,
    NamedFunction,
    ResponsesBody,
    TextFormat,
)
from headway_runtime.server.shared_fields import SharedFields
from headway_runtime.server.template_fields import TemplateOptions

# Fields that a chat has under the same name.
_SAME = (*SharedFields.model_fields, *TemplateOptions.model_fields, "parallel_tool_calls")
# Where what is wrong with a field of the chat comes from.
_ORIGINS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


def chat_of(body: ResponsesBody) -> ChatBody:
    """The chat. InvalidRequestError, in this endpoint's words, for what is wrong with it as a chat."""
    chat: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.structured_outputs is not None:
        chat["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    chat["messages"] = _messages(body)
    chat["tools"] = [_tool(tool) for tool in body.tools or ()]
    chat["tool_choice"] = body.tool_choice
    if isinstance(body.tool_choice, NamedFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    chat["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    if body.stream:
        chat["stream_options"] = {"include_usage": True}  # the last event tells the usage
    return check_body(chat, ChatBody)


def in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """The same error, told of this endpoint's fields."""
    if error.param is None:
        return error
    param, message = origin_of(error.param), str(error)
    if message.startswith(error.param):
        message = param + message.removeprefix(error.param)
    return InvalidRequestError(message, param=param, code=error.code)


def origin_of(param: str) -> str:
    """The field of this endpoint behind a field of the chat."""
    first = re.split(r"[.[]", param, maxsplit=1)[0]
    # Messages are counted differently than input items.
    rest = "" if first == "messages" else param.removeprefix(first)
    # A tool is its function there, and has one here.
    return _ORIGINS.get(first, first) + (rest.replace(".function", "") if first == "tools" else rest)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        _add_item(item, messages)
    return messages


def _add_item(item: InputItem, messages: list[dict[str, Any]]) -> None:
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        # What an assistant said and all that it called with it are one message.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif isinstance(item, CallOutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    else:
        messages.append({"role": item.role, "content": _text(item.content)})


def _text(content: str | list[ItemText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude_unset=True, exclude={"type"})
    return {"type": "function", "function": function}


def _response_format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    schema = {"name": asked.name, "schema": asked.wanted, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": schema}

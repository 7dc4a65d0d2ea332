"""The grammar of an answer that may be calls of tools, or a text, as its model chooses.

Needed where something of it is prescribed: the arguments of strict tools, or the form of an answer that is no
call. The calls are in the model's own way of writing them, so that its choice stays what it was trained to.
"""

import json
from typing import Any

from headway_runtime.errors import InvalidRequestError
from headway_runtime.grammar import COMPACT_JSON, READABLE_JSON
from headway_runtime.request import Grammar
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.structured_fields import grammar_of
from headway_runtime.server.tool_calls.hermes import BEGIN_TAG, END_TAG
from headway_runtime.server.tool_calls.llama3_json import PYTHON_TAG
from headway_runtime.server.tool_grammar import ANY_ARGUMENTS, arguments_schema, call_schema, tool_parts
from headway_runtime.structured_outputs import schema_text
from headway_runtime.tokenizer import Vocabulary

# Calls and nothing between them; without a form for other answers, text wherever the model likes.
_HERMES_ONLY = """start: answer | call {more}
call: {begin} "\\n" body "\\n" {end}
"""
_HERMES_SPECIAL = """start: call{many} TEXT
call: TEXT {begin} "\\n" body "\\n" {end}
TEXT: /(.|\\n)*/
"""
_HERMES_TEXT = """start: call{many} TEXT
call: call_begins "\\n" body "\\n" {end}
call_begins[lazy]: TEXT {begin}
TEXT: /(.|\\n)*/
"""
_LLAMA = """start: answer | {tag} body {more}
"""
# What is no call does not begin like one.
_LLAMA_TEXT = "answer: TEXT\nTEXT: /([^\\s{](.|\\n)*)?/\n"


def auto_call_grammar(body: ChatBody, call_format: str, vocabulary: Vocabulary) -> Grammar | None:
    """None if nothing is prescribed. call_format: how the model writes calls."""
    form = grammar_of(body)
    if form is None and not body.has_strict_tools:
        return None
    if body.structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs prescribes the answer and leaves no room for calls; use response_format, or "
            "send tool_choice 'none'",
            param="structured_outputs",
        )
    if call_format == "hermes":
        rules = _hermes(body, vocabulary, has_form=form is not None)
    elif call_format == "llama3_json":
        rules = _llama(body, vocabulary, has_form=form is not None)
    elif form is None:
        return None  # what strict asks for cannot be told in Python's syntax
    else:
        raise InvalidRequestError(
            "response_format leaves no room for the calls of this model, which it writes as Python; send "
            "tool_choice 'none', 'required' or a tool's name",
            param="response_format",
        )
    member = "parameters" if call_format == "llama3_json" else "arguments"
    rules += f"body: %json {_calls(body, member)}\n"
    if form is not None:
        schema = json.loads(form.source) if form.source else ANY_ARGUMENTS
        rules += f"answer: %json {schema_text(schema, strict=True, layout=READABLE_JSON)}\n"
    param = "tools" if body.has_strict_tools else "response_format"
    return Grammar("lark", "%llguidance {}\n" + rules, param, tool_parts(body))


def _hermes(body: ChatBody, vocabulary: Vocabulary, *, has_form: bool) -> str:
    is_special = bool(vocabulary.special_ids_of((BEGIN_TAG,)))
    text = _HERMES_SPECIAL if is_special else _HERMES_TEXT
    is_parallel = body.parallel_tool_calls is not False
    return (_HERMES_ONLY if has_form else text).format(
        begin=_spelled(BEGIN_TAG, vocabulary),
        end=_spelled(END_TAG, vocabulary),
        many="*" if is_parallel else "?",
        more='("\\n" call)*' if is_parallel else "",
    )


def _llama(body: ChatBody, vocabulary: Vocabulary, *, has_form: bool) -> str:
    is_special = bool(vocabulary.special_ids_of((PYTHON_TAG,)))
    rules = _LLAMA.format(
        tag=f"{PYTHON_TAG}?" if is_special else "",
        more='("; " body)*' if body.parallel_tool_calls is not False else "",
    )
    return rules if has_form else rules + _LLAMA_TEXT


def _spelled(tag: str, vocabulary: Vocabulary) -> str:
    """A tag in a grammar: as the special token that it is, or as a text."""
    return tag if vocabulary.special_ids_of((tag,)) else json.dumps(tag)


def _calls(body: ChatBody, member: str) -> str:
    """The schema of one call of any tool; arguments of tools that are not strict may be any."""
    tools = body.tools or []
    schema: dict[str, Any] = {
        "anyOf": [call_schema(index, tool, member) for index, tool in enumerate(tools)],
        "$defs": {
            f"tool_{index}": arguments_schema(tool, index) if tool.function.strict else ANY_ARGUMENTS
            for index, tool in enumerate(tools)
        },
    }
    return schema_text(schema, strict=True, layout=COMPACT_JSON)

"""Which fields of a request are accepted, and that the rest is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import parse_body
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.protocol import CompletionBody

USER = {"role": "user", "content": "hi"}
CHAT = {"model": "tiny", "messages": [USER]}
COMPLETION = {"model": "tiny", "prompt": "one two"}


@pytest.mark.parametrize(
    ("change", "want_param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"request_id": "two words"}, "request_id"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"suffix": "after"}, "suffix"),
        ({"suffix": 0}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"min_p": 1.1}, "min_p"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"no_such_option": None}, "no_such_option"),
        ({"stream_options": {"include_usage": True, "more": 1}, "stream": True}, "stream_options.more"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_what_is_not_supported_or_wrong_is_refused_by_name(
    kind: type[ChatBody] | type[CompletionBody], change: dict[str, Any], want_param: str
) -> None:
    base = CHAT if kind is ChatBody else COMPLETION
    with pytest.raises(InvalidRequestError, match=re.escape(want_param)) as caught:
        parse_body(json.dumps({**base, **change}).encode(), kind)
    assert caught.value.param == want_param


@pytest.mark.parametrize(
    ("messages", "want_param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user"}], "messages[0].content"),
        ([USER, {"role": "user", "content": None}], "messages[1].content"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{**USER, "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
    ],
)
def test_wrong_messages_are_refused_by_name(messages: object, want_param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(json.dumps({**CHAT, "messages": messages}).encode(), ChatBody)
    assert (caught.value.param or "").startswith(want_param)


def test_a_part_that_is_no_text_is_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(InvalidRequestError, match="image_url"):
        parse_body(
            json.dumps({**CHAT, "messages": [{"role": "user", "content": [image]}]}).encode(), ChatBody
        )


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "n": 1},
        {"response_format": {"type": "text"}, "tools": None, "tool_choice": "none"},
        {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"},
        {"temperature": None, "max_tokens": None, "stop": None, "stream": None, "seed": None},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {
            "tools": [
                {"type": "function", "defer_loading": False, "function": {"name": "f", "defer_loading": None}}
            ]
        },
    ],
)
def test_what_changes_nothing_is_accepted(change: dict[str, Any]) -> None:
    parse_body(json.dumps({**CHAT, **change}).encode(), ChatBody)


def test_an_answer_can_be_sent_back_as_the_client_dumps_it() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    body = parse_body(json.dumps({**CHAT, "messages": [USER, answer, USER]}).encode(), ChatBody)
    assert body.messages[1].for_template() == {"role": "assistant", "content": "hello"}


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse_body(
        json.dumps({**CHAT, "messages": [{"role": "developer", "content": parts}]}).encode(), ChatBody
    )
    assert body.messages[0].for_template() == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    ("change", "want_words", "want_code"),
    [
        ({"temprature": 1}, "did you mean 'temperature'?", "unknown_parameter"),
        ({"max_token": 1}, "did you mean 'max_tokens'?", "unknown_parameter"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "'include_usage'",
            "unknown_parameter",
        ),
        ({"colour": "red"}, "leave the field out", "unknown_parameter"),
        ({"use_beam_search": True}, "use n or best_of", "unsupported_parameter"),
        ({"guided_regex": "a"}, "structured_outputs", "unsupported_parameter"),
        ({"max_completion_tokens": 5}, "use max_tokens", "unsupported_parameter"),
        ({"messages": []}, "/v1/chat/completions", "unsupported_parameter"),
        ({"verbosity": "low"}, "leave the field out", "unsupported_parameter"),
    ],
)
def test_a_field_that_is_not_served_comes_with_the_way_out(
    change: dict[str, Any], want_words: str, want_code: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(json.dumps({**COMPLETION, **change}).encode(), CompletionBody)
    assert want_words in str(caught.value)
    assert caught.value.code == want_code

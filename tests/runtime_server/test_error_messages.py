"""What the sender of a wrong body is told: the field as it was sent, its value, what it may be and a code."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import StrictBody, parse_body
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.protocol import CompletionBody
from headway_runtime.server.responses_endpoint_protocol import ResponsesBody
from headway_runtime.server.tokenize_protocol import DetokenizeBody

USER = {"role": "user", "content": "hi"}
CHAT = {"model": "tiny", "messages": [USER]}
COMPLETION = {"model": "tiny", "prompt": "one two"}
WITH_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    ("change", "want", "want_code"),
    [
        (
            {"stream_options": USAGE},
            f"stream_options={USAGE} is only allowed with stream=true",
            "invalid_value",
        ),
        (
            {"stream": True, "return_timings": True},
            "return_timings=True with stream=true needs stream_options.include_usage=true",
            "invalid_value",
        ),
        ({"top_logprobs": 2}, "top_logprobs=2 is only allowed with logprobs=true", "invalid_value"),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens=5 differs from max_completion_tokens=6; send one",
            "invalid_value",
        ),
        (
            {
                "stream": True,
                "stream_options": {"include_usage": False, "continuous_usage_stats": True},
            },
            "stream_options.continuous_usage_stats=True asks for usage, which include_usage=false declines",
            "invalid_value",
        ),
        (
            {"stream": True, "prompt_logprobs": 1},
            "prompt_logprobs=1 is only allowed with stream=false",
            "invalid_value",
        ),
        (
            {"truncation_side": "left"},
            "truncation_side='left' is only allowed with truncate_prompt_tokens",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema={'name': 'a'} is only allowed with type 'json_schema'",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is missing; type 'json_schema' needs it",
            "missing_required_parameter",
        ),
        (
            {"response_format": WITH_SCHEMA, "structured_outputs": {"regex": "a"}},
            "structured_outputs={'regex': 'a'} prescribes the answer, as response_format does; send one",
            "mutually_exclusive_parameters",
        ),
        (
            {"structured_outputs": {}},
            "structured_outputs={} is not exactly one of json, regex",
            "missing_mutually_exclusive_parameters",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs={'regex': 'a', 'json': {}} is not exactly one of",
            "mutually_exclusive_parameters",
        ),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs.json_object=False asks for nothing",
            "invalid_value",
        ),
        (
            {"tool_choice": "required"},
            "tool_choice='required' asks for a call, but there are no tools",
            "invalid_value",
        ),
        (
            {"tool_choice": "sometimes"},
            "tool_choice='sometimes' is not one of its values; send 'none'",
            "invalid_value",
        ),
        (
            {"chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs={'tools': 1} sets 'tools'",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content=5 is of type integer; send a string, or a list of objects with type and",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].tool_call_id is missing",
            "missing_required_parameter",
        ),
        (
            {"messages": [{**USER, "tool_call_id": "c"}]},
            "messages[0].tool_call_id='c' is only allowed with role 'tool'",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type='image_url' is not one of its values; this server's models read",
            "invalid_value",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_named_with_value_and_remedy(
    change: dict[str, Any], want: str, want_code: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(json.dumps({**CHAT, **change}).encode(), ChatBody)
    assert str(caught.value).startswith(want)
    assert caught.value.param == re.split("[= ]", want, maxsplit=1)[0]
    assert caught.value.code == want_code


TOKEN_LISTS = "a list of integers from 0 to 2147483647, or a list of lists of integers from 0 to 2147483647"
PROMPTS = f"a string, or a list of strings, or {TOKEN_LISTS}"
STOPS = "send a string of 1 to 256 characters, or a list of at most 16 strings of 1 to 256 characters"


@pytest.mark.parametrize(
    ("change", "want", "want_code"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is only allowed with echo=true", "integer_below_min_value"),
        ({"n": 2, "best_of": 1}, "best_of=1 is less than n=2; raise it", "invalid_value"),
        (
            {"best_of": 2, "stream": True},
            "best_of=2 is more than n=1, which is only allowed with stream=false",
            "invalid_value",
        ),
        ({"stop": ["a"] * 17}, "stop=['a', 'a', 'a',", "array_above_max_length"),
        ({"stop": ["a"] * 17}, f"has 17 items, more than 16; {STOPS}", "array_above_max_length"),
        ({"stop": 5}, f"stop=5 is of type integer; {STOPS}", "invalid_type"),
        ({"stop": ""}, f"stop='' is empty; {STOPS}", "empty_string"),
        (
            {"stop": ["b" * 257]},
            "has 257 characters, more than 256; send a string of 1 to 256 characters",
            "string_above_max_length",
        ),
        ({"prompt": [1, "a"]}, f"prompt[1]='a' is of type string; prompt may be {PROMPTS}", "invalid_type"),
        ({"prompt": ["a", 1]}, f"prompt[1]=1 is of type integer; prompt may be {PROMPTS}", "invalid_type"),
        ({"prompt": [-1]}, f"prompt[0]=-1 is below 0; prompt may be {PROMPTS}", "integer_below_min_value"),
        (
            {"prompt": [[1], [-1]]},
            "prompt[1][0]=-1 is below 0; send an integer",
            "integer_below_min_value",
        ),
        ({"prompt": None}, f"prompt=None is of type null; send {PROMPTS}", "invalid_type"),
        ({"prompt": {}}, f"prompt={{}} is of type object; send {PROMPTS}", "invalid_type"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens=0 is below 1; send -1, or an integer from 1 to 2147483647",
            "integer_below_min_value",
        ),
        (
            {"temperature": float("nan")},
            "temperature=nan is not a finite number; send a finite number from 0 to 2",
            "invalid_value",
        ),
        (
            {"top_p": float("inf")},
            "top_p=inf is not a finite number; send a finite number from 0 to 1",
            "invalid_value",
        ),
        (
            {"max_tokens": float("nan")},
            "max_tokens=nan is not a finite number; send an integer from 0",
            "invalid_value",
        ),
        ({"max_tokens": 5.5}, "max_tokens=5.5 is of type number; send an integer from 0", "invalid_type"),
        ({"max_tokens": True}, "max_tokens=True is of type boolean; send an integer from 0", "invalid_type"),
        ({"n": 0}, "n=0 is below 1; send an integer from 1 to 128", "integer_below_min_value"),
        ({"seed": 10**400}, "is above 9223372036854775807; send an integer from", "integer_above_max_value"),
        (
            {"logit_bias": []},
            "logit_bias=[] is of type array; send an object with finite numbers from -100 to 100",
            "invalid_type",
        ),
        (
            {"allowed_token_ids": []},
            "allowed_token_ids=[] is empty; send a list of one or more integers from 0",
            "empty_array",
        ),
        (
            {"request_id": "two words"},
            "request_id='two words' has another form; send a string that matches ^[A-Z",
            "invalid_value",
        ),
        (
            {"truncation_side": "up"},
            "truncation_side='up' is not one of its values; send 'left' or 'right'",
            "invalid_value",
        ),
        ({"stream": "yes"}, "stream='yes' is of type string; send true or false", "invalid_type"),
    ],
)
def test_a_wrong_value_is_told_with_all_that_the_field_may_be(
    change: dict[str, Any], want: str, want_code: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(json.dumps({**COMPLETION, **change}).encode(), CompletionBody)
    assert want in str(caught.value)
    assert caught.value.code == want_code
    assert str(caught.value).startswith(f"{caught.value.param}=")
    assert re.split(r"\[", caught.value.param or "")[0] in change


MANY = 100_000


@pytest.mark.parametrize(
    ("kind", "change", "want"),
    [
        (CompletionBody, {"prompt": [[5]] * MANY + [["a"]]}, f"prompt[{MANY}][0]='a' is of type string"),
        (CompletionBody, {"prompt": [5] * MANY + ["a"]}, f"prompt[{MANY}]='a' is of type string"),
        (CompletionBody, {"stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]='a' is of type string"),
        (CompletionBody, {"allowed_token_ids": ["a"] * MANY}, "allowed_token_ids[0]='a' is of type string"),
        (CompletionBody, {"logit_bias": {str(at): "a" for at in range(MANY)}}, "logit_bias={'0': 'a',"),
        (CompletionBody, {f"x{at}": 1 for at in range(MANY)}, "x0=1 is one of 100002 members"),
        (ChatBody, {"messages": [5] * MANY}, "messages[0]=5 is of type integer"),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * MANY}]}, "messages[0].content[0]=5 is of"),
        (ChatBody, {"metadata": {str(at): 5 for at in range(MANY)}}, "metadata={'0': 5,"),
        (ChatBody, {"documents": [5] * MANY}, "documents[0]=5 is of type integer"),
        (ChatBody, {"documents": [{str(at): 5 for at in range(MANY)}]}, "documents[0]={'0': 5,"),
        (ChatBody, {"messages": [{f"x{at}": 1 for at in range(MANY)}]}, "messages[0].x0=1 is one of"),
        (ResponsesBody, {"input": [5] * MANY}, "input[0]=5 is of type integer"),
        (ResponsesBody, {"include": [5] * MANY}, "include[0]=5 is of type integer"),
        (DetokenizeBody, {"tokens": ["a"] * MANY}, "tokens[0]='a' is of type string"),
    ],
)  # fmt: skip
def test_of_what_is_wrong_a_hundred_thousand_times_the_first_fault_is_told(
    kind: type[StrictBody], change: dict[str, Any], want: str
) -> None:
    """To look for them all would take seconds, in which no stream would move."""
    bases: dict[type[StrictBody], dict[str, Any]] = {
        CompletionBody: COMPLETION,
        ChatBody: CHAT,
        ResponsesBody: {"input": "a"},
    }
    base = bases.get(kind, {})
    raw = json.dumps({**base, **change}).encode()
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(raw)
    assert found.value.error_count() < 10
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(raw, kind)
    assert str(caught.value).startswith(want)
    assert len(str(caught.value)) < 500

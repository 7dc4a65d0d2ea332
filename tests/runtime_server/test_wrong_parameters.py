"""Every parameter of every endpoint, and of every object in one, at values that it may not have.

What may be sent is read from the OpenAPI document: each property of each body, and of each object within one,
is sent nothing, null, every JSON type, numbers that are none, and what lies just outside its bounds. What the
document forbids must be answered 400, with the place in `param`, OpenAI's code, the value and a way out.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import httpx2 as httpx
import jsonschema_rs
import pytest

from headway_runtime.errors import RequestCode
from headway_runtime.server.openapi import openapi_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import StartServer

DOCUMENT: Any = json.loads(openapi_json())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "one"}
PART = {"type": "text", "text": "one"}
ITEM_PART = {"type": "input_text", "text": "one"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "rain"}
ITEM_TOOL = {"type": "function", **FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
TEXT_FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}

# A name of what is not there, which no schema can know.
ABSENT = {"model_not_found", "adapter_not_found", "adapter_not_usable"}

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """An object in a body that is right, and the name of its schema."""

    endpoint: str
    body: dict[str, Any]
    path: Path
    schema: str


PLACES = [
    Place(CHAT, {"messages": [USER]}, (), "ChatBody"),
    Place(COMPLETION, {"prompt": "one"}, (), "CompletionBody"),
    Place(RESPONSES, {"input": "one"}, (), "ResponsesBody"),
    Place("/tokenize", {"prompt": "one"}, (), "TokenizeBody"),
    Place("/tokenize", {"messages": [USER]}, (), "TokenizeBody"),
    Place("/detokenize", {"tokens": [40]}, (), "DetokenizeBody"),
    Place("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, (), "LoadAdapterBody"),
    Place("/v1/unload_lora_adapter", {"lora_name": "a"}, (), "UnloadAdapterBody"),
    Place(COMPLETION, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
          ("stream_options",), "StreamOptions"),
    Place(COMPLETION, {"prompt": "a", "response_format": SCHEMA_FORMAT},
          ("response_format",), "ResponseFormat"),
    Place(COMPLETION, {"prompt": "a", "response_format": SCHEMA_FORMAT},
          ("response_format", "json_schema"), "JsonSchema"),
    Place(COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "a"}},
          ("structured_outputs",), "StructuredOutputs"),
    Place(CHAT, {"messages": [USER]}, ("messages", 0), "ChatMessage"),
    Place(CHAT, {"messages": [{"role": "user", "content": [PART]}]},
          ("messages", 0, "content", 0), "TextPart"),
    Place(CHAT, {"messages": CALLING}, ("messages", 1, "tool_calls", 0), "ToolCall"),
    Place(CHAT, {"messages": CALLING}, ("messages", 1, "tool_calls", 0, "function"), "FunctionCall"),
    Place(CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, ("tools", 0), "Tool"),
    Place(CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
          ("tools", 0, "function"), "FunctionDefinition"),
    Place(CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": NAMED}, ("tool_choice",), "NamedTool"),
    Place(CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": NAMED},
          ("tool_choice", "function"), "FunctionName"),
    Place(RESPONSES, {"input": [{"role": "user", "content": "one"}]}, ("input", 0), "MessageItem"),
    Place(RESPONSES, {"input": [{"role": "user", "content": [ITEM_PART]}]},
          ("input", 0, "content", 0), "ItemText"),
    Place(RESPONSES, {"input": [CALL_ITEM, OUTPUT_ITEM]}, ("input", 0), "CallItem"),
    Place(RESPONSES, {"input": [CALL_ITEM, OUTPUT_ITEM]}, ("input", 1), "CallOutputItem"),
    Place(RESPONSES, {"input": "a", "tools": [ITEM_TOOL], "tool_choice": "none"},
          ("tools", 0), "FunctionTool"),
    Place(RESPONSES, {"input": "a", "tools": [ITEM_TOOL], "tool_choice": {"type": "function", "name": "f"}},
          ("tool_choice",), "NamedFunction"),
    Place(RESPONSES, {"input": "a", "text": {"format": TEXT_FORMAT}}, ("text",), "TextOptions"),
    Place(RESPONSES, {"input": "a", "reasoning": {"effort": "low"}}, ("reasoning",), "ReasoningOptions"),
    Place(RESPONSES, {"input": "a", "text": {"format": TEXT_FORMAT}}, ("text", "format"), "TextFormat"),
]  # fmt: skip
SLOTS = [(place, name) for place in PLACES for name in SCHEMAS[place.schema]["properties"]]
SLOT_IDS = [
    f"{place.endpoint} {'.'.join(map(str, (*place.path, name)))} {place.schema}" for place, name in SLOTS
]
NOT_NUMBERS = (math.nan, math.inf, -math.inf)
# Of every JSON type some, among them those that are most easily mistaken for one another.
OF_EVERY_TYPE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        5,
        -5,
        0.5,
        1e300,
        10**30,
        10**400,
        -(10**400),
        "",
        "x",
        "5",
        [],
        ["x"],
        [5],
        [0.5],
        [True],
    ),
    *([None], [[]], [[5]], [[-5]], [{}], {}, {"x": 5}, {"x": None}, {"type": "x"}, ["x", 5], [5, "x"]),
    *NOT_NUMBERS,
)


@pytest.fixture(scope="module")
def client(start_shared_server: StartServer) -> Iterator[httpx.Client]:
    server = start_shared_server("--enable-lora", "--allow-runtime-lora-updating")
    with httpx.Client(base_url=server.url, timeout=30) as one:
        yield one


def parts_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives that a schema leaves, null aside."""
    if "$ref" in schema:
        return parts_of(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if alternatives is None:
        return [schema] if schema.get("type") != "null" else []
    return [part for one in alternatives for part in parts_of(one)]


def just_outside(part: dict[str, Any]) -> Iterator[Any]:
    """Values beside the bounds."""
    if "minimum" in part:
        yield part["minimum"] - 1
    if "exclusiveMinimum" in part:
        yield part["exclusiveMinimum"]
    if "maximum" in part:
        yield part["maximum"] + 1
    if "maxLength" in part:
        yield "x" * (part["maxLength"] + 1)
    if "maxItems" in part:
        yield [sample(part["items"])] * (part["maxItems"] + 1)
    if "pattern" in part:
        yield "two words"


def sample(schema: dict[str, Any]) -> Any:
    """Something that a list may hold."""
    part = parts_of(schema)[0]
    if part.get("type") == "string":
        return "x"
    name = next(name for name, one in SCHEMAS.items() if one is part)
    return {"Tool": TOOL, "FunctionTool": ITEM_TOOL, "ToolCall": CALL}[name]


def json_type(value: object) -> str:
    kinds = {
        type(None): "null",
        bool: "boolean",
        int: "integer",
        str: "string",
        list: "array",
        dict: "object",
    }
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return kinds[type(value)]


def want_codes(schema: dict[str, Any], value: Any) -> set[str]:
    """The codes that are right for a value that the schema forbids."""
    kind, not_a_number = json_type(value), isinstance(value, float) and not math.isfinite(value)
    parts = parts_of(schema)
    types = {json_type(one.get("const", one.get("enum", [None])[0])) if "type" not in one else one["type"]
             for one in parts}  # fmt: skip
    if not_a_number and types & {"integer", "number"}:
        return {"invalid_value"}
    fitting = types & ({kind, "number"} if kind == "integer" else {kind})
    if not fitting:
        return {"invalid_type"}
    if kind in ("array", "object") and value:
        # It may be too long, or something in it is wrong in any way that something can be.
        return set(get_args(RequestCode)) - {"invalid_json", "context_length_exceeded"}
    if kind in ("integer", "number"):
        name = "decimal" if "number" in fitting else "integer"
        low = min(one.get("minimum", one.get("exclusiveMinimum", -math.inf)) for one in parts)
        return {f"{name}_below_min_value"} if value <= max(low, 0) else {f"{name}_above_max_value"}
    if kind == "array":
        return {"empty_array"}
    if kind == "object":
        return {"missing_required_parameter", "missing_mutually_exclusive_parameters"}
    if any("enum" in one or "const" in one or "pattern" in one for one in parts):
        return {"invalid_value"}
    return {"empty_string"} if not value else {"string_above_max_length"}


def param_of(path: Path) -> str:
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).removeprefix(".")


def changed(place: Place, name: str, value: Any, *, without: bool = False) -> dict[str, Any]:
    body = copy.deepcopy(place.body)
    inner: Any = body
    for part in place.path:
        inner = inner[part]
    if without:
        del inner[name]
    else:
        inner[name] = value
    return body


def send(client: httpx.Client, place: Place, body: dict[str, Any]) -> httpx.Response:
    # The client would not write what is no JSON.
    content = json.dumps(body).encode()
    return client.post(place.endpoint, content=content, headers={"Content-Type": "application/json"})


def check_refusal(response: httpx.Response, param: str, shown: str | None, what: str) -> Any:
    assert response.status_code == 400, what
    error = response.json()["error"]
    message = error["message"]
    assert (error["type"], error["code"] in get_args(RequestCode)) == ("invalid_request_error", True), what
    assert error["param"].startswith(param), what
    assert message.startswith(error["param"]), what
    assert shown is None or shown in message, what
    assert ";" in message, f"no remedy: {what}"
    for leak in ("Value error", "Input should", "validation", "constrained", "function-", "StrictBody"):
        assert leak not in message, what
    assert len(message) < 1000, what
    return error


def is_allowed(schema: dict[str, Any], value: Any) -> bool:
    if any(isinstance(one, float) and not math.isfinite(one) for one in [value]):
        return False
    whole = {**schema, "components": DOCUMENT["components"]}
    return bool(jsonschema_rs.validator_for(whole).is_valid(value))


@pytest.mark.parametrize(("place", "name"), SLOTS, ids=SLOT_IDS)
def test_a_parameter_at_a_value_that_it_may_not_have_is_refused_by_name(
    client: httpx.Client, place: Place, name: str
) -> None:
    schema = SCHEMAS[place.schema]["properties"][name]
    is_served = "Not served" not in schema.get("description", "")
    param = param_of((*place.path, name))
    num_refused = 0
    for value in [*OF_EVERY_TYPE, *(one for part in parts_of(schema) for one in just_outside(part))]:
        response = send(client, place, changed(place, name, value))
        shown = repr(value)[:70]
        what = f"{param}={shown}: {response.status_code} {response.text[:600]}"
        if is_allowed(schema, value) or value is None:
            # Other fields, or the model, may have something against it; or there is no such model.
            assert response.status_code in (200, 400, 404), what
            if response.status_code != 200:
                assert response.json()["error"]["param"], what
                assert response.json()["error"]["code"] in {*get_args(RequestCode), *ABSENT}, what
            continue
        num_refused += 1
        deeper = isinstance(value, dict) or (isinstance(value, list) and value)
        error = check_refusal(response, param, None if deeper else shown, what)
        if not is_served:
            assert error["code"] == "unsupported_parameter", what
        elif name == "type" and place.schema in ("MessageItem", "CallItem", "CallOutputItem"):
            assert error["code"] in ("invalid_value", "invalid_type"), what  # it says which item it is
        else:
            assert error["code"] in want_codes(schema, value), what
    assert num_refused >= 3, "it takes nearly anything"


@pytest.mark.parametrize("place", PLACES, ids=[f"{one.endpoint} {one.schema}" for one in PLACES])
def test_what_is_missing_or_unknown_is_named_with_what_there_is(client: httpx.Client, place: Place) -> None:
    for name in SCHEMAS[place.schema].get("required", ()):
        if name == "type" and place.schema in ("CallItem", "CallOutputItem"):
            continue  # without it, the item is another one
        response = send(client, place, changed(place, name, None, without=True))
        error = check_refusal(response, param_of((*place.path, name)), "is missing", response.text)
        assert error["code"] == "missing_required_parameter"
    response = send(client, place, changed(place, "stranger", [1]))
    error = check_refusal(response, param_of((*place.path, "stranger")), "[1]", response.text)
    assert error["code"] == "unknown_parameter"


def test_every_object_of_every_body_is_there() -> None:
    """Whatever has properties in the document and is part of a body has been looked into."""
    seen: set[str] = set()
    pending = [place.schema for place in PLACES if not place.path]
    while pending:
        name = pending.pop()
        if name not in seen and "properties" in SCHEMAS[name]:
            seen.add(name)
            text = json.dumps(SCHEMAS[name])
            pending += [part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]]
    assert seen == {place.schema for place in PLACES}
    posted = {path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {})}
    assert posted == {place.endpoint for place in PLACES}


INTEGERS = [
    (place, name)
    for place, name in SLOTS
    if any(part.get("type") == "integer" for part in parts_of(SCHEMAS[place.schema]["properties"][name]))
]


@pytest.mark.parametrize(
    ("place", "name"), INTEGERS, ids=[f"{place.endpoint} {name}" for place, name in INTEGERS]
)
def test_an_integer_may_be_written_as_a_number_without_a_fraction(
    client: httpx.Client, place: Place, name: str
) -> None:
    with_others = {
        "best_of": {"n": 1},
        "top_logprobs": {"include": ["message.output_text.logprobs"]}
        if place.endpoint == RESPONSES
        else {"logprobs": True},
    }
    body = changed(place, name, 5.0) | with_others.get(name, {})
    assert b": 5.0" in json.dumps(body).encode()
    whole = send(client, place, body)
    assert whole.status_code == 200, whole.text
    for value in (5.5, True):
        assert send(client, place, changed(place, name, value)).status_code == 400


def test_integers_in_lists_may_be_written_so_too(client: httpx.Client) -> None:
    for path, body in (
        (COMPLETION, {"prompt": [40.0, 41], "stop_token_ids": [50.0], "allowed_token_ids": [40.0]}),
        (COMPLETION, {"prompt": [[40.0], [41]], "max_tokens": 2.0}),
        ("/detokenize", {"tokens": [40.0, 41]}),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
    assert client.post("/detokenize", json={"tokens": [40.0, 41]}).json() == (
        client.post("/detokenize", json={"tokens": [40, 41]}).json()
    )


@pytest.mark.parametrize(
    ("raw", "want_code", "want_words"),
    [
        (b"[]", "invalid_type", "the body is [], of type array; send a JSON object"),
        (b"null", "invalid_type", "the body is None, of type null; send a JSON object"),
        (b'"a"', "invalid_type", "the body is 'a', of type string; send a JSON object"),
        (b"5.5", "invalid_type", "the body is 5.5, of type number; send a JSON object"),
        (b'{"prompt": ', "invalid_json", "the body is not valid JSON"),
        (b"", "invalid_json", "send a JSON object"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_object_is_told_what_it_is(
    client: httpx.Client, path: str, raw: bytes, want_code: str, want_words: str
) -> None:
    response = client.post(path, content=raw, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, want_code, None)
    assert want_words in error["message"]


def test_what_is_no_number_is_refused_wherever_it_is(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"maximum": math.nan}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for place, path, value in (
        (PLACES[0], "chat_template_kwargs", {"a": [math.inf]}),
        (PLACES[0], "tools", [{"type": "function", "function": {"name": "f", "parameters": schema}}]),
        (PLACES[1], "structured_outputs", {"json": schema}),
        (PLACES[1], "response_format", form),
        (PLACES[1], "logit_bias", {"5": math.nan}),
    ):
        response = send(client, place, changed(place, path, value))
        error = check_refusal(response, path, None, response.text)
        assert "nan" in error["message"] or "inf" in error["message"]

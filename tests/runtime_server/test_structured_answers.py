"""Answers of a prescribed form, through the `openai` client: the engine with random weights keeps to it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from tests.runtime_server.conftest import connect

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[openai.OpenAI]:
    with connect(real_server) as found:
        yield found


def check_schema(text: str | None) -> None:
    value = json.loads(text or "")
    assert set(value) == {"name", "size"}
    assert value["size"] in (1, 2, 3)


@pytest.mark.parametrize("strict", [True, False, None])
def test_an_answer_of_a_schema_is_one(client: openai.OpenAI, strict: Any) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": strict}}
    for seed in range(2):
        chat = client.chat.completions.create(
            model="tiny", messages=HI, response_format=asked, max_tokens=400, seed=seed
        )
        assert chat.choices[0].finish_reason == "stop"
        check_schema(chat.choices[0].message.content)
    text = client.completions.create(
        model="tiny", prompt="Hi", max_tokens=400, seed=1, extra_body={"response_format": asked}
    )
    check_schema(text.choices[0].text)


def test_a_streamed_answer_of_a_schema_is_one(client: openai.OpenAI) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    stream = client.chat.completions.create(
        model="tiny", messages=HI, response_format=asked, max_tokens=400, seed=4, stream=True
    )
    check_schema("".join(chunk.choices[0].delta.content or "" for chunk in stream))


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    size: int = pydantic.Field(ge=0, le=99)


def test_the_clients_own_helper_parses_the_answer(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=City, max_tokens=400, seed=2
    )
    assert isinstance(completion.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", "per|haps"]}, r"yes|no|per\|haps"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"json": {"enum": [5, 7]}}, "5|7"),
        ({"json": '{"enum": [5, 7]}'}, "5|7"),
    ],
    ids=["regex", "choice", "grammar", "json", "json as text"],
)
def test_an_answer_has_the_form_that_was_asked_for(
    client: openai.OpenAI, asked: dict[str, Any], pattern: str
) -> None:
    for seed in range(2):
        options: dict[str, Any] = {"seed": seed, "extra_body": {"structured_outputs": asked}}
        chat = client.chat.completions.create(model="tiny", messages=HI, max_tokens=60, **options)
        assert re.fullmatch(pattern, chat.choices[0].message.content or ""), chat
        text = client.completions.create(model="tiny", prompt="Hi", max_tokens=60, **options)
        assert re.fullmatch(pattern, text.choices[0].text), text


# All that vLLM's StructuredOutputsParams has, as `dataclasses.asdict` writes it.
WHOLE = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}


@pytest.mark.parametrize(
    "asked", [{"regex": "[ab]{3}"}, {"regex": "[ab]{3}", "disable_any_whitespace": None}]
)
def test_vllms_parameters_may_be_written_out_whole(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    options: dict[str, Any] = {"seed": 1, "extra_body": {"structured_outputs": {**WHOLE, **asked}}}
    chat = client.chat.completions.create(model="tiny", messages=HI, max_tokens=60, **options)
    assert re.fullmatch(asked["regex"], chat.choices[0].message.content or ""), chat
    response = client.responses.create(model="tiny", input="Hi", extra_body=options["extra_body"])
    assert re.fullmatch(asked["regex"], response.output_text), response


@pytest.mark.parametrize(
    ("asked", "want_words"),
    [
        ({"disable_additional_properties": True}, "set additionalProperties to false"),
        ({"disable_fallback": True}, "nothing to fall back to"),
        ({"whitespace_pattern": " *"}, "disable_any_whitespace"),
        ({"structural_tag": "{}"}, "use tools"),
    ],
)
def test_what_vllms_parameters_have_besides_is_refused_with_a_way_out(
    fake_server: Any, asked: dict[str, Any], want_words: str
) -> None:
    with connect(fake_server) as client, pytest.raises(openai.BadRequestError, match=want_words) as caught:
        client.completions.create(
            model="tiny", prompt="Hi", extra_body={"structured_outputs": {**WHOLE, "json": SCHEMA, **asked}}
        )
    (field,) = asked
    assert (caught.value.param, caught.value.code) == (f"structured_outputs.{field}", "unsupported_parameter")


def test_a_structural_tag_is_refused_with_a_way_out(fake_server: Any) -> None:
    asked: Any = {"type": "structural_tag", "structures": [], "triggers": []}
    with connect(fake_server) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, response_format=asked)
    assert caught.value.param == "response_format.type"
    assert "use tools for calls" in caught.value.message


@pytest.mark.parametrize(
    "asked", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object_begins_as_one(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    chat = client.chat.completions.create(model="tiny", messages=HI, max_tokens=20, seed=1, extra_body=asked)
    assert (chat.choices[0].message.content or "").lstrip().startswith("{")


LENIENT = {"x-guidance": {"lenient": True}}
NOT_EITHER = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"not": {}, **LENIENT}, "strict": True},
}
NOT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}, "strict": True}}


@pytest.mark.parametrize(
    ("asked", "want_param"),
    [
        ({"response_format": NOT}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"type": "wrong"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        # How strict the library is, is not the client's to say.
        ({"structured_outputs": {"json": {"not": {}, **LENIENT}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps({"not": {}, **LENIENT})}}, "structured_outputs.json"),
        ({"response_format": NOT_EITHER}, "response_format"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outp",
        ),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    client: openai.OpenAI, asked: dict[str, Any], want_param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, extra_body=asked)
    assert (caught.value.param or "").startswith(want_param), caught.value.message
    if want_param.startswith("guided"):
        assert "structured_outputs" in caught.value.message


def test_a_refused_schema_is_shown_as_it_was_sent(client: openai.OpenAI) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wrong"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, response_format=asked)
    assert """response_format='{"type": "wrong"}' cannot be enforced""" in caught.value.message


def test_a_schema_that_is_not_strict_is_followed_as_far_as_it_goes(client: openai.OpenAI) -> None:
    schema = {**SCHEMA, "not": {"required": ["x"]}}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    chat = client.chat.completions.create(
        model="tiny", messages=HI, response_format=asked, max_tokens=400, seed=1
    )
    check_schema(chat.choices[0].message.content)


@pytest.fixture(scope="module")
def spaces(byte_level_tokenizer: Any) -> dict[str, float]:
    """A bias that makes a model write white space wherever it may."""
    return {str(byte_level_tokenizer.token_to_id(name)): 100.0 for name in ("Ġ", "Ċ", "ĉ", "č")}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "structured_outputs"],
)
def test_a_model_in_love_with_white_space_comes_to_an_end(
    client: openai.OpenAI, spaces: dict[str, float], body: Any
) -> None:
    options: Any = {"logit_bias": spaces, "temperature": 0, "max_tokens": 450, "extra_body": body}
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, **options).choices
    assert choice.finish_reason == "stop", choice
    check_schema(choice.message.content)


@pytest.mark.parametrize("asked", [{"json": SCHEMA}, {"json": json.dumps(SCHEMA)}])
def test_white_space_can_be_disabled(
    client: openai.OpenAI, spaces: dict[str, float], asked: dict[str, Any]
) -> None:
    outputs = {**asked, "disable_any_whitespace": True}
    options: Any = {"logit_bias": spaces, "temperature": 0, "max_tokens": 100}
    (choice,) = client.chat.completions.create(
        model="tiny", messages=HI, extra_body={"structured_outputs": outputs}, **options
    ).choices
    text = choice.message.content or ""
    check_schema(text)
    name = json.loads(text)["name"]
    assert text.replace(json.dumps(name, ensure_ascii=False), "N") in [
        f'{{"name": N, "size": {size}}}' for size in (1, 2, 3)
    ]


def test_an_object_without_white_space_is_one(client: openai.OpenAI, spaces: dict[str, float]) -> None:
    outputs = {"json_object": True, "disable_any_whitespace": True}
    options: Any = {"logit_bias": spaces, "temperature": 0, "max_tokens": 3}
    (choice,) = client.chat.completions.create(
        model="tiny", messages=HI, extra_body={"structured_outputs": outputs}, **options
    ).choices
    assert (choice.message.content or "").startswith(('{"', "{}"))


def test_other_forms_have_no_white_space_to_be_disabled(client: openai.OpenAI) -> None:
    outputs = {"regex": "a", "disable_any_whitespace": True}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Hi", extra_body={"structured_outputs": outputs})
    assert caught.value.param == "structured_outputs.disable_any_whitespace"

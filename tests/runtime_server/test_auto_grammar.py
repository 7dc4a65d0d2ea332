"""What is prescribed of an answer that may be calls or text, as the model likes."""

import json
from collections.abc import Iterator
from typing import Any

import llguidance
import openai
import pytest

from headway_runtime.errors import InvalidRequestError
from headway_runtime.grammar import library_text
from headway_runtime.request import Grammar
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.tool_auto_grammar import auto_call_grammar

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
STRICT: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}}
LOOSE: Any = {"type": "function", "function": {"name": "g", "parameters": PARAMETERS}}
FORM: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"unit": "C"}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"unit": "F"}}'


class Tags:
    """A vocabulary in which tags are special tokens, or plain text."""

    def __init__(self, *, are_special: bool) -> None:
        self._are_special = are_special

    def special_ids_of(self, names: tuple[str, ...]) -> frozenset[int]:
        return frozenset({1}) if self._are_special else frozenset()


def grammar(kind: str, *, are_special: bool = False, **fields: Any) -> Grammar | None:
    body = ChatBody.model_validate({"messages": HI, "tools": [STRICT, LOOSE], **fields})
    return auto_call_grammar(body, kind, Tags(are_special=are_special))  # type: ignore[arg-type]


def accepts(asked: Grammar, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, library_text(asked))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "form", "text", "want"),
    [
        ("hermes", None, HERMES, True),
        ("hermes", None, f"Hm. {HERMES}\n{HERMES} Well.", True),
        ("hermes", None, "Just text, with {braces}.", True),
        ("hermes", None, HERMES.replace("unit", "unity"), False),
        ("hermes", None, HERMES.replace('"f"', '"other"'), False),
        ("hermes", None, HERMES.replace('"f"', '"g"').replace("unit", "unity"), True),
        ("hermes", FORM, HERMES, True),
        ("hermes", FORM, f"{HERMES}\n{HERMES}", True),
        ("hermes", FORM, '{"a": 1}', True),
        ("hermes", FORM, '{"a": 2}', False),
        ("hermes", FORM, "Just text.", False),
        ("llama3_json", None, LLAMA, True),
        ("llama3_json", None, f"{LLAMA}; {LLAMA}", True),
        ("llama3_json", None, "Just text.", True),
        ("llama3_json", None, LLAMA.replace("unit", "unity"), False),
        ("llama3_json", FORM, LLAMA, True),
        ("llama3_json", FORM, '{"a": 1}', True),
        ("llama3_json", FORM, "Just text.", False),
    ],
)
def test_a_grammar_lets_the_model_choose_and_holds_it_to_its_choice(
    kind: str,
    form: Any,
    text: str,
    want: bool,  # noqa: FBT001
) -> None:
    asked = grammar(kind, response_format=form)
    assert asked is not None
    assert asked.param == "tools"
    assert accepts(asked, text) is want


@pytest.mark.parametrize("kind", ["hermes", "llama3_json"])
@pytest.mark.parametrize("form", [None, FORM, {"type": "json_object"}], ids=["text", "schema", "object"])
@pytest.mark.parametrize("is_parallel", [True, False], ids=["parallel", "single"])
def test_every_grammar_compiles(kind: str, form: Any, is_parallel: bool) -> None:  # noqa: FBT001
    asked = None
    for are_special in (True, False):
        asked = grammar(kind, are_special=are_special, response_format=form, parallel_tool_calls=is_parallel)
        assert asked is not None
        assert not llguidance.LLMatcher.validate_grammar(library_text(asked)), asked.source
    if form is FORM and asked is not None:
        two = {"hermes": f"{HERMES}\n{HERMES}", "llama3_json": f"{LLAMA}; {LLAMA}"}[kind]
        assert accepts(asked, two) is is_parallel


def test_what_prescribes_nothing_makes_no_grammar() -> None:
    assert grammar("hermes", tools=[LOOSE]) is None
    assert grammar("pythonic") is None, "strict cannot be said of calls in Python"


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammar("pythonic", response_format=FORM)
    assert caught.value.param == "response_format"
    with pytest.raises(InvalidRequestError) as caught:
        grammar("hermes", structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"


@pytest.fixture(scope="module", params=["hermes", "llama3_json"])
def client(start_shared_server: Any, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """Of a model that has the one's tags as text, and the other's as a special token."""
    flags = (f"--tool-call-parser={request.param}", "--max-num-seqs=8", "--num-threads=1")
    url = start_shared_server(*flags, fake=False).url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_a_random_model_answers_in_the_form_or_calls(client: openai.OpenAI) -> None:
    found = set()
    for seed in range(8):
        completion = client.chat.completions.create(
            model="tiny",
            messages=HI,
            tools=[STRICT],
            response_format=FORM,
            parallel_tool_calls=False,
            max_tokens=400,
            seed=seed,
        )
        (choice,) = completion.choices
        found.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "f"
            assert json.loads(call.function.arguments)["unit"] in ("C", "F")
        else:
            assert json.loads(choice.message.content or "") == {"a": 1}
    assert "tool_calls" in found, "the way of a random model is mostly this one"


def test_a_strict_tool_leaves_text_free(client: openai.OpenAI) -> None:
    for seed in range(4):
        completion = client.chat.completions.create(
            model="tiny", messages=HI, tools=[STRICT], max_tokens=30, seed=seed
        )
        (choice,) = completion.choices
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            assert call.function.name == "f"
        assert choice.message.content or choice.message.tool_calls


@pytest.mark.parametrize("gap", ["  ", "\n\n", "\t"])
def test_white_space_within_calls_and_answers_is_bounded(gap: str) -> None:
    asked = grammar("hermes", response_format=FORM)
    assert asked is not None
    assert accepts(asked, '{"a": 1}')
    assert accepts(asked, '{\n  "a": 1\n}')
    assert accepts(asked, HERMES)
    assert not accepts(asked, f'{{"a":{gap}1}}')
    assert not accepts(asked, HERMES.replace('"f", ', f'"f",{gap}'))


@pytest.mark.parametrize(
    ("choice", "strict"),
    [("required", True), ("auto", True), (None, True), ("by name", True), ("by name", False)],
)
def test_a_tool_whose_parameters_cannot_be_enforced_is_named(
    client: openai.OpenAI, choice: str | None, *, strict: bool
) -> None:
    # What no schema can be, strict or not; or what only strictness forbids.
    schema = {"not": {}} if strict else {"properties": {"a": {"pattern": "("}}}
    lost = {"name": "lost", "strict": strict, "parameters": schema}
    tools = [STRICT, {"type": "function", "function": lost}]
    options: dict[str, Any] = {} if choice is None else {"tool_choice": choice}
    if choice == "by name":
        options = {"tool_choice": {"type": "function", "function": {"name": "lost"}}}
    create: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", messages=HI, tools=tools, **options)
    assert (caught.value.param, caught.value.code) == ("tools[1].function.parameters", "invalid_grammar")
    assert "of tool 'lost' cannot be enforced" in caught.value.message

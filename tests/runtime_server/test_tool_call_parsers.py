"""Parsers of tool calls: what they find, and that it does not depend on how the text arrives."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_runtime.server.tool_calls.choose import FORMATS, detect_format
from headway_runtime.server.tool_calls.forced import NamedParser, RequiredParser
from headway_runtime.server.tool_calls.pieces import Piece, ToolCallParser

NAMES = ("get_weather", "now")
PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    **{name: partial(one.make, NAMES) for name, one in FORMATS.items()},
    "required": RequiredParser,
    "named": lambda: NamedParser("now"),
}


@dataclass
class Parsed:
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


def joined(pieces: list[Piece]) -> Parsed:
    """Pieces put together as a client does it."""
    found = Parsed()
    for piece in pieces:
        if isinstance(piece, str):
            assert piece, "no empty content"
            found.content += piece
        else:
            if piece.name is not None:
                assert piece.index == len(found.names), "calls begin in order, each once"
                found.names.append(piece.name)
                found.arguments.append("")
            assert piece.index == len(found.names) - 1, "a call does not go on after the next has begun"
            found.arguments[piece.index] += piece.arguments
    return found


def parse(kind: str, parts: list[str]) -> Parsed:
    parser = PARSERS[kind]()
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + parser.finish())


def calls(kind: str, text: str) -> list[tuple[str, object]]:
    found = parse(kind, [text])
    return [
        (name, json.loads(arguments)) for name, arguments in zip(found.names, found.arguments, strict=True)
    ]


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("kind", "text", "want_calls", "want_content"),
    [
        ("hermes", "Just text.\n", [], "Just text.\n"),
        ("hermes", HERMES_CALL, [PARIS], ""),
        ("hermes", f"Let me see.\n\n{HERMES_CALL}\n{HERMES_CALL}", [PARIS, PARIS], "Let me see."),
        ("hermes", f"{HERMES_CALL}\nThere you are.", [PARIS], "There you are."),
        ("hermes", HERMES_CALL.removesuffix("</tool_call>"), [PARIS], ""),
        ("hermes", HERMES_CALL.removesuffix("</tool_call>") + HERMES_CALL, [PARIS, PARIS], ""),
        (
            "hermes",
            '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
            [PARIS],
            "",
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
            [PARIS],
            "",
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})], ""),
        (
            "hermes",
            '<tool_call>{"i": 3, "name": "now", "arguments": {"a": "}</tool_call>\\"{"}, "x": 1}</tool_call>',
            [("now", {"a": '}</tool_call>"{'})],
            "",
        ),
        (
            "hermes",
            "<tool_call>get_weather(Paris)</tool_call>",
            [],
            "<tool_call>get_weather(Paris)</tool_call>",
        ),
        ("hermes", '<tool_call>{"name": "get', [], '<tool_call>{"name": "get'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}', [], '<tool_call>{"name": 3, "arguments": {}}'),
        (
            "hermes",
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
            [],
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
        ),
        (
            "hermes",
            '<tool_call>{"arguments": [1], "name": "now"}</tool_call> and',
            [],
            '<tool_call>{"arguments": [1], "name": "now"}</tool_call> and',
        ),
        ("hermes", "1 < 2 <tool", [], "1 < 2 <tool"),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS], ""),
        (
            "llama3_json",
            '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
            [PARIS],
            "",
        ),
        (
            "llama3_json",
            '{"name": "now", "parameters": {}}; {"name": "get_weather", "arguments": {"city": "Paris"}}',
            [("now", {}), PARIS],
            "",
        ),
        ("llama3_json", 'Yes. <|python_tag|>{"name": "now", "parameters": {}}', [("now", {})], "Yes."),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', [], '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"name": "now"}', [], '{"name": "now"}'),
        ("llama3_json", '{"city": "Paris"} it is', [], '{"city": "Paris"} it is'),
        ("llama3_json", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
        ("llama3_json", "  <|pyt", [], "  <|pyt"),
        ("pythonic", '[get_weather(city="Paris")]', [PARIS], ""),
        (
            "pythonic",
            "<|python_start|>[ get_weather(city='Paris'), now() ]<|python_end|>",
            [PARIS, ("now", {})],
            "",
        ),
        (
            "pythonic",
            "[now(a=[1, -2.5, {'k': None}], b=true, c=')\\'\"]')]",
            [("now", {"a": [1, -2.5, {"k": None}], "b": True, "c": ")'\"]"})],
            "",
        ),
        ("pythonic", "[1, 2, 3]", [], "[1, 2, 3]"),
        ("pythonic", "[now(1)]", [], "[now(1)]"),
        ("pythonic", "[now(a=open('x'))]", [], "[now(a=open('x'))]"),
        ("pythonic", "[now(a='\\ud800')]", [], "[now(a='\\ud800')]"),
        ("pythonic", "[delete_all()]", [], "[delete_all()]"),
        ("pythonic", "[now(), broken(", [("now", {})], ", broken("),
        ("pythonic", "Hello [now()]", [], "Hello [now()]"),
        (
            "required",
            '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]',
            [("now", {}), PARIS],
            "",
        ),
        ("named", '{"city": "Paris"}', [("now", {"city": "Paris"})], ""),
    ],
)
def test_calls_and_content_are_found(
    kind: str, text: str, want_calls: list[tuple[str, object]], want_content: str
) -> None:
    assert calls(kind, text) == want_calls
    assert parse(kind, [text]).content == want_content
    assert parse(kind, list(text)) == parse(kind, [text])


def test_arguments_leave_as_they_come() -> None:
    parser = FORMATS["hermes"].make(NAMES)
    assert parser.push('<tool_call>{"name": "now", "arguments": ') == []
    assert joined(parser.push("{")) == Parsed("", ["now"], ["{"])
    (piece,) = parser.push('"zone": "U')
    assert not isinstance(piece, str)
    assert (piece.index, piece.name, piece.arguments) == (0, None, '"zone": "U')
    (piece,) = parser.push('TC"}}</tool')
    assert not isinstance(piece, str)
    assert piece.arguments == 'TC"}'
    assert parser.push("_call>") == parser.finish() == []


def test_a_call_that_goes_wrong_after_it_began_stays_as_written() -> None:
    found = parse("hermes", ['<tool_call>{"name": "now", "arguments": {"a": oops}} Sorry.'])
    assert found == Parsed(" Sorry.".strip(), ["now"], ['{"a": oops}'])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    '{"name": "now", "arguments": {"a": 1}}', '{"name": "now", ', '"parameters": {"b": "x}"}}',
    '{"name":"get_weather","parameters":{}}', '"arguments": ', "[now(a=1)]", "[now(", "a='x\\'", "')",
    "get_weather(city=", "[", "]", "{", "}", "(", ")", ",", ";", ":", '"', "'", "\\", "\\\\", " ", "\n", "\t",
    "x", "é", "日", "1", "null", "\\ud800", "<", "|", "now", "-",
]  # fmt: skip


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=250, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(codec="utf-8"), max_size=5)), max_size=14
    ),
    data=st.data(),
)
def test_any_cut_gives_the_same(kind: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) if text else set())
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    want = parse(kind, [text])
    assert parse(kind, pieces) == want
    assert parse(kind, list(text)) == want
    if kind not in ("required", "named") and not want.names:
        assert want.content == text, "without a call, all of it is content"
    "".join([want.content, *want.names, *want.arguments]).encode()  # can be sent


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "required"])
@settings(max_examples=100, deadline=None)
@given(
    made=st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS), min_size=1, max_size=3), size=st.integers(1, 9)
)
def test_any_arguments_come_back(kind: str, made: list[tuple[str, object]], size: int) -> None:
    member = "parameters" if kind == "llama3_json" else "arguments"
    written = [json.dumps({"name": name, member: arguments}) for name, arguments in made]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written),
        "llama3_json": "; ".join(written),
        "required": f"[{', '.join(written)}]",
    }[kind]
    found = parse(kind, [text[start : start + size] for start in range(0, len(text), size)])
    assert found.content == ""
    assert found.names == [name for name, _ in made]
    assert [json.loads(one) for one in found.arguments] == [arguments for _, arguments in made]


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% if tools %}<tool_call>{{ tools }}{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", None),
        ('{% if tools %}{"name": f, "parameters": x}{% endif %} ipython', "llama3_json"),
        (
            '{% if tools %}{{ "{\\"name\\": f, \\"parameters\\": x}" }}<|python_tag|>{% endif %}',
            "llama3_json",
        ),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_the_parser_is_chosen_by_the_template(template: str, want: str | None) -> None:
    assert detect_format(template) == want

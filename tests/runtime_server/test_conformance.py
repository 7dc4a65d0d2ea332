"""The conformance tables say what the server does, and every "yes" in them names a test that shows it.

docs/conformance.md is read here: its fields are the fields of the request bodies, both ways; what it says is
refused is refused; each test it names exists, speaks to a server through the `openai` client and uses the
field.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from pydantic import BaseModel

from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import StrictBody, parse_body
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.protocol import CompletionBody, GenerationBody
from headway_runtime.server.refused_fields import NEUTRAL_FIELDS, REFUSALS
from headway_runtime.server.responses_endpoint_protocol import ResponsesBody
from headway_runtime.server.tokenize_protocol import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import RunningServer

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs" / "conformance.md"
# Of each table: the body whose fields it lists, and the body whose fields another table lists already.
TABLES: dict[str, tuple[type[StrictBody], type[StrictBody] | None]] = {
    "Both completion endpoints": (GenerationBody, None),
    "/v1/completions": (CompletionBody, GenerationBody),
    "/v1/chat/completions": (ChatBody, GenerationBody),
    "/v1/responses": (ResponsesBody, None),
    "/tokenize": (TokenizeBody, None),
    "/detokenize": (DetokenizeBody, None),
}


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    parameters: tuple[str, ...]
    headway: str
    last: str


@functools.cache
def rows() -> list[Row]:
    found: list[Row] = []
    section = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| parameter", "| ---")):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            assert len(cells) == 5, line
            found.append(Row(section, tuple(re.findall(r"`([^`]+)`", cells[0])), cells[3], cells[4]))
    return found


def fields_of(body: type[BaseModel], without: type[BaseModel] | None) -> Iterator[str]:
    """Names of fields; of the options of a stream, which are a body in the body, the inner ones."""
    for name, field in body.model_fields.items():
        if without is not None and name in without.model_fields:
            continue
        if name == "stream_options":
            (inner,) = [one for one in field.annotation.__args__ if one is not type(None)]  # type: ignore[union-attr]
            yield from (f"{name}.{one}" for one in inner.model_fields)
        else:
            yield name


@pytest.mark.parametrize("section", TABLES)
def test_the_tables_and_the_bodies_have_the_same_fields(section: str) -> None:
    listed = [name for row in rows() if row.section == section for name in row.parameters]
    body, without = TABLES[section]
    assert sorted(listed) == sorted(fields_of(body, without))
    assert len(set(listed)) == len(listed)


def test_every_refused_field_is_in_the_last_table_and_no_other() -> None:
    listed = {name for row in rows() if row.section == "Refused" for name in row.parameters}
    served = set(CompletionBody.model_fields) & set(ChatBody.model_fields)
    assert listed == (set(NEUTRAL_FIELDS) | set(REFUSALS)) - served
    assert {row.section for row in rows()} == {*TABLES, "Refused"}


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_what_is_said_to_be_refused_is_refused_by_name(body: type[StrictBody]) -> None:
    needed = {"prompt": "a"} if body is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}
    for row in rows():
        if row.section != "Refused":
            continue
        assert row.headway.startswith("no"), row
        for name in set(row.parameters) - set(body.model_fields):
            with pytest.raises(InvalidRequestError) as caught:
                parse_body(json.dumps({**needed, name: {"wanted": 1}}).encode(), body)
            assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
            parse_body(json.dumps({**needed, name: None}).encode(), body)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_the_values_listed_ask_for_nothing_and_there_are_no_others(
    endpoint: str, fake_server: RunningServer
) -> None:
    body: type[StrictBody] = CompletionBody if endpoint == "/v1/completions" else ChatBody
    needed = {"prompt": "a"} if body is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}
    for row in rows():
        if row.section != "Refused":
            continue
        values = [json.loads(one) for one in re.findall(r"`([^`]+)`", row.headway)]
        for name in set(row.parameters) - set(body.model_fields):
            assert json.dumps(values) == json.dumps(list(NEUTRAL_FIELDS.get(name, ()))), row
            for value in values:
                asked = {**needed, "max_tokens": 1, name: value}
                answer = httpx.post(f"{fake_server.url}{endpoint}", json=asked, timeout=30)
                assert answer.status_code == 200, (row, value, answer.text)


def test_what_asks_for_nothing_of_responses_is_accepted() -> None:
    for name, values in ResponsesBody.neutral.items():
        for value in (None, *values):
            parse_body(json.dumps({"input": "a", name: value}).encode(), ResponsesBody)


def test_the_way_out_in_the_table_is_the_one_in_the_message() -> None:
    for row in rows():
        if row.section == "Refused":
            named = re.findall(r"`([^`]+)`", row.last)
            for name in row.parameters if named else ():
                assert any(one in REFUSALS[name] for one in named), row


@functools.cache
def syntax(file: str) -> ast.Module:
    return ast.parse((HERE / file).read_text(encoding="utf-8"))


def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {
        node.name: node
        for node in syntax(file).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def gives_a_client(file: str, name: str) -> bool:
    """Whether a fixture of `file` gives an `openai` client."""
    function = functions(file).get(name)
    is_fixture = function is not None and any(
        "fixture" in ast.unparse(one) for one in function.decorator_list
    )
    return bool(is_fixture and function and function.returns and "openai." in ast.unparse(function.returns))


def constants(file: str) -> dict[str, ast.expr]:
    """What the module of a test gives names to."""
    found: dict[str, ast.expr] = {}
    for node in syntax(file).body:
        if isinstance(node, ast.Assign):
            found |= {one.id: node.value for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def names_sent(node: ast.AST, named: dict[str, ast.expr]) -> Iterator[str]:
    """Names that go into requests: keywords of calls, and keys of dictionaries but for those compared with.

    named: the constants of the module, each of which is looked into once.
    """
    if isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Dict):
        yield from (
            key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            yield node.slice.value
    elif isinstance(node, ast.Name) and node.id in named:
        yield from names_sent(named[node.id], {name: one for name, one in named.items() if name != node.id})
    compared = node.comparators if isinstance(node, ast.Compare) else []
    for inner in ast.iter_child_nodes(node):
        if not (inner in compared and isinstance(inner, ast.Dict)):
            yield from names_sent(inner, named)


CLAIMS = [(name, row.last.strip("`")) for row in rows() if row.section in TABLES for name in row.parameters]


@pytest.mark.parametrize(("parameter", "test"), CLAIMS, ids=[f"{name} {test}" for name, test in CLAIMS])
def test_every_claim_names_a_test_that_uses_the_field_through_the_client(parameter: str, test: str) -> None:
    file, _, name = test.partition("::")
    function = functions(file).get(name)
    assert function is not None, f"{test} does not exist"
    arguments = [one.arg for one in [*function.args.args, *function.args.kwonlyargs]]
    clients = [one for one in arguments if gives_a_client(file, one) or gives_a_client("conftest.py", one)]
    assert clients, f"{test} uses no openai client"
    assert any(isinstance(node, ast.Name) and node.id in clients for node in ast.walk(function)), (
        f"{test} has a client and does not use it"
    )
    sent = set(names_sent(function, constants(file)))
    assert set(parameter.split(".")) <= sent, f"{test} sends no {parameter}, only {sorted(sent)}"


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("ask(n=1, extra_body={'top_k': {'x': 2}})", {"n", "extra_body", "top_k", "x"}),
        ("assert ask(a=1).usage == {'n': 1}", {"a"}),
        ("assert 'n' in text; x = 'top_p'; option.seed = 1; f['read']", set()),
        ("body['stop'] = 1", {"stop"}),
        ("for one in KNOWN: ask(**one)", {"temperature"}),
        ("run(options | {'n': 2})", {"n"}),
    ],
)
def test_only_what_is_sent_counts_as_used(source: str, want: set[str]) -> None:
    known = ast.parse("[{'temperature': 1}]", mode="eval").body
    assert set(names_sent(ast.parse(source), {"KNOWN": known})) == want


def test_every_row_says_what_headway_does() -> None:
    for row in rows():
        if row.section in TABLES:
            assert re.match(r"(yes|accepted)(;|$)", row.headway), row

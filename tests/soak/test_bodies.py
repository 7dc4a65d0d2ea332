"""Random bodies against the parsers: each is read or refused with words, and nothing else ever happens."""

import importlib
import json
import os
import pkgutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_runtime import server
from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import StrictBody, parse_body


def whole_bodies() -> list[type[StrictBody]]:
    """Every kind of body that a route reads: the leaves of the tree of body classes."""
    for module in pkgutil.iter_modules(server.__path__, f"{server.__name__}."):
        if "protocol" in module.name:
            importlib.import_module(module.name)
    found, pending = [], [StrictBody]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__name__.endswith("Body") and not kind.__subclasses__():
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


KINDS = whole_bodies()
# The soak asks for more, which are others each time; without it they are the same in every run.
EXAMPLES = int(os.environ.get("HEADWAY_FUZZ_EXAMPLES", "150"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)

odd_numbers = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, -0.0, 1e-320, 0.5])
leaves = st.none() | st.booleans() | odd_numbers | st.floats() | st.integers() | st.text(max_size=12)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


def bodies(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields of `kind`, and a stranger, with anything in them."""
    names = st.sampled_from([*kind.model_fields, "stranger"])
    start = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1], "input": "a"}
    whole = {name: value for name, value in start.items() if name in kind.model_fields}
    return st.dictionaries(names, values, max_size=4).map(lambda drawn: {**whole, **drawn})


def test_every_kind_of_body_is_fuzzed() -> None:
    names = [kind.__name__ for kind in KINDS]
    assert {"ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody"} <= set(names)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_json_is_read_or_refused_with_words(kind: type[Any]) -> None:
    @SETTINGS
    @given(bodies(kind))
    def check(body: dict[str, Any]) -> None:
        try:
            parsed = parse_body(json.dumps(body).encode(), kind)
        except InvalidRequestError as refusal:
            message = str(refusal)
        else:
            assert isinstance(parsed, kind)
            assert "stranger" not in body
            return
        assert len(message) > 10

    check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_bytes_are_read_or_refused_with_words(kind: type[Any]) -> None:
    @SETTINGS
    @given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def check(body: bytes) -> None:
        try:
            parsed = parse_body(body, kind)
        except InvalidRequestError as refusal:
            message = str(refusal)
        else:
            # Whoever draws long enough draws a whole body.
            assert set(json.loads(body)) <= set(kind.model_fields)
            assert isinstance(parsed, kind)
            return
        assert len(message) > 10

    check()

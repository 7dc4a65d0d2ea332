"""What is refused, and how compiling is bounded, shared and taken back."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from headway_runtime import grammar_compiler
from headway_runtime.grammar import MAX_SOURCE_CHARACTERS, GrammarError
from headway_runtime.grammar_compiler import GrammarCompiler, GrammarTimeoutError
from headway_runtime.grammar_trial import load_library_tokenizer, problem_of
from headway_runtime.request import Grammar, GrammarKind
from headway_runtime.sources import BUNDLED_FOLDER

FOLDER = BUNDLED_FOLDER / "headway-tiny"
VOCAB_SIZE = 1536
# Each text is looked for among all that the others leave, of which there are 2 to the 24th kinds.
PATTERNS = [{"type": "string", "pattern": f".*[{chr(97 + one)}].{{{one + 5}}}"} for one in range(24)]
INTERSECTED = Grammar("json_schema", json.dumps({"allOf": PATTERNS}))
ENDLESS = Grammar("json_schema", '{"type": "integer", "multipleOf": 100000007}')


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_library_tokenizer(FOLDER, VOCAB_SIZE, [0])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_object", ""),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}'),
        ("json_schema", "true"),
        ("regex", r"\w+(-\d{2})?"),
        ("choice", '["a", "b"]'),
        ("choice", '["", "\\u00e9\\n/"]'),
        ("lark", 'start: "a" | /[b-d]+/'),
        ("ebnf", 'root ::= "a" root | "b"'),
        ("ebnf", 'start: "a" start | "b"'),
    ],
)
def test_usable_grammars_are_valid(tokenizer: Any, kind: GrammarKind, source: str) -> None:
    assert problem_of(Grammar(kind, source), tokenizer) is None


@pytest.mark.parametrize(
    ("kind", "source", "complaint"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[" * 5000, "not JSON"),
        ("json_schema", "3", "not an object"),
        ("json_schema", "false", "not an object"),
        ("json_schema", '{"type": "stringy"}', "stringy"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "#/$defs/missing"}', "missing"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 3]', "at least one"),
        ("choice", "a", "not JSON"),
        ("lark", "start: foo", "foo"),
        ("ebnf", "root = a", "neither GBNF nor Lark"),
        ("ebnf", 'root ::= "a', "neither GBNF nor Lark"),
        ("ebnf", 'root ::= "a" \\', "neither GBNF nor Lark"),
        ("ebnf", "root ::= " + "(" * 4000, "neither GBNF nor Lark"),
        ("ebnf", 'a ::= "b"', "root"),
        ("regex", "a" * (MAX_SOURCE_CHARACTERS + 1), "shorten it"),
    ],
)
def test_unusable_grammars_are_named_with_the_reason(
    tokenizer: Any, kind: GrammarKind, source: str, complaint: str
) -> None:
    problem = problem_of(Grammar(kind, source), tokenizer)
    assert problem is not None
    assert complaint in problem
    assert len(problem) < 1100


@pytest.fixture
def make_compiler() -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def make(
        timeout_seconds: float = 30.0, folder: Path = FOLDER, vocab_size: int = VOCAB_SIZE
    ) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, vocab_size, timeout_seconds, lambda: None))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_equal_grammars_are_compiled_once_and_followed_separately(make_compiler: Any) -> None:
    compiler = make_compiler()
    first = compiler.submit(Grammar("regex", "ab", "response_format"))
    second = compiler.submit(Grammar("regex", "ab", "structured_outputs"))
    assert first is second
    matchers = [first.result().deep_copy() for _ in range(2)]
    assert compiler.eos_token_ids == frozenset({0, 2})
    assert matchers[0].try_consume_tokens([67]) == 1  # "a"
    assert [one.is_accepting() for one in matchers] == [False, False]
    assert matchers[1].try_consume_tokens([68]) == 0  # "b" does not come first
    assert not first.result().is_error()


def test_failures_are_remembered(make_compiler: Any) -> None:
    compiler = make_compiler()
    bad = Grammar("regex", "(")
    future = compiler.submit(bad)
    with pytest.raises(GrammarError, match="unclosed group"):
        future.result()
    assert compiler.submit(bad) is future


def test_passing_time_is_not_remembered(make_compiler: Any) -> None:
    compiler = make_compiler(timeout_seconds=0.5)
    future = compiler.submit(ENDLESS)
    with pytest.raises(GrammarTimeoutError, match=r"within 0\.5 s"):
        future.result()
    assert compiler.submit(ENDLESS) is not future
    # The process for trials was killed; the next one is there for the next grammar.
    assert compiler.submit(Grammar("choice", '["x"]')).result().is_error() is False


def test_the_oldest_grammars_are_forgotten(make_compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "NUM_KEPT_GRAMMARS", 3)
    compiler = make_compiler()
    futures = {text: compiler.submit(Grammar("regex", text)) for text in ("a", "b", "c")}
    assert compiler.submit(Grammar("regex", "a")) is futures["a"]
    compiler.submit(Grammar("regex", "d"))
    assert compiler.submit(Grammar("regex", "a")) is futures["a"]
    assert compiler.submit(Grammar("regex", "b")) is not futures["b"]


def test_what_nobody_waits_for_is_not_begun(make_compiler: Any) -> None:
    compiler = make_compiler(timeout_seconds=20.0)
    busy = [
        Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 100000007 + i})) for i in range(4)
    ]
    for one in busy:
        compiler.submit(one)
    waiting = Grammar("regex", "abc")
    future = compiler.submit(waiting)
    compiler.cancel(waiting)
    with pytest.raises(CancelledError):
        future.result()
    assert compiler.submit(waiting) is not future


def test_closing_ends_what_is_being_compiled(make_compiler: Any) -> None:
    compiler = make_compiler(timeout_seconds=600.0)
    warm = compiler.submit(Grammar("regex", "a"))
    warm.result()
    future = compiler.submit(ENDLESS)
    started_at = time.monotonic()
    # Begun or not: both have to end.
    compiler.close()
    with pytest.raises((GrammarError, CancelledError)):
        future.result(timeout=60)
    assert time.monotonic() - started_at < 60


def test_too_much_memory_is_a_refusal(make_compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make_compiler(timeout_seconds=100.0)
    compiler.submit(Grammar("regex", "a")).result()
    trial = compiler._idle[0]
    thread = threading.Timer(0.5, trial._process.kill)
    thread.start()
    with pytest.raises(GrammarError, match="too much memory"):
        compiler.submit(ENDLESS).result()
    thread.join()


def test_lines_that_come_together_are_read_one_by_one(make_compiler: Any) -> None:
    trial = make_compiler()._take_trial()
    command = [sys.executable, "-c", 'print(\'{"a": 1}\\n{"a": 2}\')']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        trial._process = process
        assert [trial._read(5.0), trial._read(5.0)] == [{"a": 1}, {"a": 2}]
        with pytest.raises(EOFError):
            trial._read(5.0)


def test_tokens_that_only_the_model_has_are_never_allowed(make_compiler: Any) -> None:
    compiler = make_compiler(vocab_size=VOCAB_SIZE + 70)
    matcher = compiler.submit(Grammar("regex", "(.|\n)*")).result()
    mask = matcher.compute_bitmask()
    allowed = [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]
    assert len(allowed) > 1000
    assert max(allowed) < VOCAB_SIZE
    # Of special tokens only those that end a sequence.
    assert {token for token in allowed if token < 3} == {0, 2}


def test_a_model_whose_tokenizer_is_not_readable_says_so(make_compiler: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    future = make_compiler(folder=tmp_path).submit(Grammar("regex", "a"))
    with pytest.raises(GrammarError, match="tokenizer cannot be used with grammars"):
        future.result()


def test_one_that_is_closed_takes_no_line_of_the_next_one(make_compiler: Any) -> None:
    """What threads of the first still wait for must not be read from a pipe of the second's."""
    for _ in range(8):
        first = make_compiler(timeout_seconds=600.0)
        futures = [first.submit(Grammar("regex", f"a{index}")) for index in range(3)]
        first.close()
        second = make_compiler(timeout_seconds=60.0)
        assert second.submit(Grammar("regex", "b")).result(timeout=60).is_error() is False
        second.close()
        for future in futures:
            if not future.cancelled():
                # In time or ended: but it ends.
                assert future.exception(timeout=60) is None or isinstance(future.exception(), GrammarError)

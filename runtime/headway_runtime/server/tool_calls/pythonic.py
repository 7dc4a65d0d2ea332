"""Calls as Llama 4 and others write them: [get_weather(city="Paris"), now()], as in Python.

Such a list is the answer's beginning, and may stand between <|python_start|> and <|python_end|>. Each call
goes out when its parenthesis closes. Arguments are named literals, which are read and never run. What is no
call of a tool that was offered is content, word for word, and so is all that follows it.
"""

import ast
import json
import warnings
from collections.abc import Collection
from enum import Enum, auto

from headway_runtime.server.tool_calls.content import Content
from headway_runtime.server.tool_calls.pieces import CallPiece, Piece

START_TAG = "<|python_start|>"
END_TAG = "<|python_end|>"
MAX_CALL_CHARACTERS = 1 << 16
_WORDS = {"true": True, "false": False, "null": None}


class _At(Enum):
    START = auto()  # before the list's bracket
    NAME = auto()  # before a call or within its name
    ARGUMENTS = auto()
    NEXT = auto()  # after a call
    END = auto()  # after the list
    CONTENT = auto()


class PythonicParser:
    """The state of one answer. names: of the tools that were offered."""

    __slots__ = ("_at", "_content", "_depth", "_names", "_num_calls", "_part", "_quote", "_written")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._content = Content()
        self._at = _At.START
        self._num_calls = 0
        # Since the last call: all that was written, and the part of it that is now being read.
        self._written = ""
        self._part = ""
        self._depth = 0
        self._quote = ""

    def push(self, text: str) -> list[Piece]:
        """What has become certain with `text`."""
        pieces: list[Piece] = []
        for position, character in enumerate(text):
            if self._at is _At.CONTENT:
                self._add_content(text[position:], pieces)
                break
            self._written += character
            self._step(character, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, now that the answer has ended."""
        pieces: list[Piece] = []
        if self._at is not _At.END:
            self._give_up(pieces)
        if rest := self._content.finish():
            pieces.append(rest)
        return pieces

    def _step(self, character: str, pieces: list[Piece]) -> None:
        if self._at is _At.ARGUMENTS:
            self._step_in_arguments(character, pieces)
            return
        if character.isspace() and not self._part.strip():
            return
        match self._at, character:
            case _At.START, "[" if self._part in ("", START_TAG):
                self._go_to(_At.NAME)
            case _At.START, _:
                self._expect(START_TAG, character, pieces)
            case _At.NAME, "(":
                if self._part.strip() in self._names:
                    self._at, self._depth = _At.ARGUMENTS, 1
                    self._part = self._part.strip() + "("
                else:
                    self._give_up(pieces)
            case _At.NAME, _ if character not in "[]{}\"',;:=":
                self._part += character
            case _At.NEXT, ",":
                self._go_to(_At.NAME)
            case ((_At.NEXT | _At.NAME), "]") if self._num_calls and not self._part:
                self._go_to(_At.END)
            case _At.END, _:
                self._expect(END_TAG, character, pieces)
                if self._part == END_TAG:
                    self._written = self._part = ""
            case _:
                self._give_up(pieces)

    def _step_in_arguments(self, character: str, pieces: list[Piece]) -> None:
        is_escaped = self._quote and self._part.endswith("\\") and _is_odd_run(self._part)
        self._part += character
        if self._quote:
            if character == self._quote and not is_escaped:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_call(pieces)
        if len(self._part) > MAX_CALL_CHARACTERS:
            self._give_up(pieces)

    def _end_call(self, pieces: list[Piece]) -> None:
        name = self._part.partition("(")[0]
        arguments = _arguments_of("f" + self._part[len(name) :])
        if arguments is None:
            self._give_up(pieces)
            return
        pieces.append(CallPiece(self._num_calls, name, arguments))
        self._num_calls += 1
        self._content.call()
        self._written = ""
        self._go_to(_At.NEXT)

    def _go_to(self, at: _At) -> None:
        self._at, self._part = at, ""

    def _expect(self, tag: str, character: str, pieces: list[Piece]) -> None:
        self._part += character
        if not tag.startswith(self._part):
            self._give_up(pieces)

    def _give_up(self, pieces: list[Piece]) -> None:
        self._at = _At.CONTENT
        written, self._written = self._written, ""
        self._add_content(written, pieces)

    def _add_content(self, text: str, pieces: list[Piece]) -> None:
        if out := self._content.push(text):
            pieces.append(out)


def _is_odd_run(text: str) -> bool:
    """Whether `text` ends with an odd number of backslashes."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _arguments_of(call: str) -> str | None:
    """The arguments of a Python call as JSON; None if they are no named literals."""
    try:
        with warnings.catch_warnings():
            # What Python has to say of a model's escape sequences is nobody's business.
            warnings.simplefilter("ignore")
            node = ast.parse(call, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        found: dict[str, object] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in found:
                return None
            found[keyword.arg] = _literal(keyword.value)
        arguments = json.dumps(found, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # fails for halves of characters, which Python's escapes can spell
        return arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    """The value of a literal, with JSON's own words allowed. ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("only texts name members")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON value")
    return value

"""Calls as Llama 3 models write them: {"name": ..., "parameters": {...}}, several of them joined by ';'.

No tag need mark them, so the answer's very beginning, or what follows <|python_tag|>, is a call only if it is
an object that names one of the tools that were offered; everything else is content, word for word.
"""

from collections.abc import Collection

from headway_runtime.server.tool_calls.call_object import CallObject
from headway_runtime.server.tool_calls.content import Content
from headway_runtime.server.tool_calls.pieces import Piece, end_of_tag_start

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser:
    """The state of one answer. names: of the tools that were offered."""

    __slots__ = ("_call", "_content", "_held", "_may_begin", "_names", "_num_calls", "_skipped")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._content = Content()
        self._held = ""
        self._num_calls = 0
        self._call: CallObject | None = None
        # Whether a call may begin here, and what was passed over since it could.
        self._may_begin = True
        self._skipped = ""

    def push(self, text: str) -> list[Piece]:
        """What has become certain with `text`."""
        return self._read(text, is_last=False)

    def finish(self) -> list[Piece]:
        """What was held back, now that the answer has ended."""
        pieces = self._read("", is_last=True)
        call, self._call = self._call, None
        if call is not None and not call.has_begun:
            self._skipped += call.written
        if self._skipped.strip(" \t\r\n;") or self._num_calls == 0:
            self._give_up(pieces)
        if rest := self._content.finish():
            pieces.append(rest)
        return pieces

    def _read(self, text: str, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text):
            if self._call is not None:
                position = self._read_call(self._call, text, position, pieces)
            elif self._may_begin:
                position = self._read_beginning(text, position, pieces, is_last=is_last)
            else:
                position = self._read_content(text, position, pieces, is_last=is_last)
        return pieces

    def _read_call(self, call: CallObject, text: str, position: int, pieces: list[Piece]) -> int:
        had_begun = call.has_begun
        position, found = call.push(text, position)
        pieces += found
        if call.has_begun and not had_begun:
            self._skipped = ""
            self._content.call()
        if call.has_ended:
            self._call = None
            if call.has_begun:
                self._num_calls += 1
            else:
                self._skipped += call.written
                self._give_up(pieces)
        return position

    def _read_beginning(self, text: str, position: int, pieces: list[Piece], *, is_last: bool) -> int:
        """Pass over white space, the tag, and between two calls a semicolon."""
        first = text[position]
        if first == "{":
            self._call = CallObject(self._num_calls, self._names, needs_arguments=True)
        elif first.isspace() or (first == ";" and self._num_calls):
            self._skipped += first
            return position + 1
        elif text.startswith(PYTHON_TAG, position):
            self._skipped += PYTHON_TAG
            return position + len(PYTHON_TAG)
        elif PYTHON_TAG.startswith(text[position : position + len(PYTHON_TAG)]) and not is_last:
            self._held = text[position:]
            return len(text)
        else:
            self._give_up(pieces)
        return position

    def _read_content(self, text: str, position: int, pieces: list[Piece], *, is_last: bool) -> int:
        rest = text[position:]
        tag = rest.find(PYTHON_TAG)
        if tag < 0:
            end = len(rest) if is_last else end_of_tag_start(rest, PYTHON_TAG)
            self._add_content(rest[:end], pieces)
            self._held = rest[end:]
            return len(text)
        self._add_content(rest[:tag], pieces)
        self._may_begin = True
        return position + tag

    def _give_up(self, pieces: list[Piece]) -> None:
        """What was passed over is content after all."""
        self._may_begin = False
        self._add_content(self._skipped, pieces)
        self._skipped = ""

    def _add_content(self, text: str, pieces: list[Piece]) -> None:
        if out := self._content.push(text):
            pieces.append(out)

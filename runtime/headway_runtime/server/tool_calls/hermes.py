"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

Text around the calls is content; white space next to a call is not. A missing end tag is forgiven. What
stands in the tags and is no call is content, tags included.
"""

from headway_runtime.server.tool_calls.call_object import CallObject
from headway_runtime.server.tool_calls.content import Content
from headway_runtime.server.tool_calls.pieces import Piece, end_of_tag_start

BEGIN_TAG = "<tool_call>"
END_TAG = "</tool_call>"


class HermesParser:
    """The state of one answer."""

    __slots__ = ("_call", "_content", "_held", "_is_after_call", "_num_calls")

    def __init__(self) -> None:
        self._content = Content()
        self._held = ""
        self._num_calls = 0
        self._call: CallObject | None = None
        self._is_after_call = False

    def push(self, text: str) -> list[Piece]:
        """What has become certain with `text`."""
        return self._read(text, is_last=False)

    def finish(self) -> list[Piece]:
        """What was held back, now that the answer has ended."""
        pieces = self._read("", is_last=True)
        if self._call is not None and not self._call.has_begun:
            self._add_content(BEGIN_TAG + self._call.written, pieces)
        self._call = None
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
            elif self._is_after_call:
                position = self._read_end_tag(text, position, is_last=is_last)
            else:
                position = self._read_content(text, position, pieces, is_last=is_last)
        return pieces

    def _read_call(self, call: CallObject, text: str, position: int, pieces: list[Piece]) -> int:
        had_begun = call.has_begun
        position, found = call.push(text, position)
        pieces += found
        if call.has_begun and not had_begun:
            self._content.call()
        if call.has_ended:
            self._call = None
            if call.has_begun:
                self._num_calls += 1
                self._is_after_call = True
            else:
                self._add_content(BEGIN_TAG + call.written, pieces)
        return position

    def _read_end_tag(self, text: str, position: int, *, is_last: bool) -> int:
        """Pass over the end tag, and over white space before it."""
        rest = text[position:].lstrip()
        if not rest:
            return len(text)
        if END_TAG.startswith(rest) and len(rest) < len(END_TAG) and not is_last:
            self._held = rest
            return len(text)
        self._is_after_call = False
        position = len(text) - len(rest)
        return position + len(END_TAG) if rest.startswith(END_TAG) else position

    def _read_content(self, text: str, position: int, pieces: list[Piece], *, is_last: bool) -> int:
        tag = text.find(BEGIN_TAG, position)
        if tag >= 0:
            self._add_content(text[position:tag], pieces)
            self._call = CallObject(self._num_calls)
            return tag + len(BEGIN_TAG)
        rest = text[position:]
        end = len(rest) if is_last else end_of_tag_start(rest, BEGIN_TAG)
        self._add_content(rest[:end], pieces)
        self._held = rest[end:]
        return len(text)

    def _add_content(self, text: str, pieces: list[Piece]) -> None:
        if out := self._content.push(text):
            pieces.append(out)

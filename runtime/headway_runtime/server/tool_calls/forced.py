"""Calls whose form a grammar dictates: a list of calls, or the arguments of the one tool that was named.

Nothing here is content. The grammar lets nothing else be written, so there is nothing to fall back to; an
answer that its length cut short ends in the middle of a call.
"""

from headway_runtime.server.tool_calls.call_object import CallObject
from headway_runtime.server.tool_calls.pieces import CallPiece, Piece


class RequiredParser:
    """[{"name": ..., "arguments": {...}}, ...]"""

    __slots__ = ("_call", "_num_calls")

    def __init__(self) -> None:
        self._num_calls = 0
        self._call: CallObject | None = None

    def push(self, text: str) -> list[Piece]:
        """What has become certain with `text`."""
        pieces: list[Piece] = []
        position = 0
        while position < len(text):
            if self._call is None:
                # Between the calls there is white space, a comma and the list's own brackets.
                if text[position] == "{":
                    self._call = CallObject(self._num_calls)
                else:
                    position += 1
                continue
            position, found = self._call.push(text, position)
            pieces += found
            if self._call.has_ended:
                self._num_calls += self._call.has_begun
                self._call = None
        return pieces

    def finish(self) -> list[Piece]:
        """Nothing is ever held back."""
        return []


class NamedParser:
    """The whole answer is the arguments of `name`."""

    __slots__ = ("_has_begun", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        """What has become certain with `text`."""
        if not text:
            return []
        name = None if self._has_begun else self._name
        self._has_begun = True
        return [CallPiece(0, name, text)]

    def finish(self) -> list[Piece]:
        """Nothing is ever held back."""
        return []

"""One call written as a JSON object, {"name": ..., "arguments": {...}}, read while it is being written.

As soon as the name is known and the arguments have begun, they go out as they come. A call whose arguments
come first waits until its name is there. Other members are passed over. What is no such object is malformed:
before anything went out, all of it can still be taken for content; after that, the call stays as it is.
"""

import json
from collections.abc import Collection
from enum import Enum, auto

from headway_runtime.server.tool_calls.json_values import WHITE_SPACE, ValueEnd
from headway_runtime.server.tool_calls.pieces import CallPiece

ARGUMENT_MEMBERS = ("arguments", "parameters")


class _At(Enum):
    BEGIN = auto()  # before the object's brace
    KEY = auto()  # before a member's name, or the end
    COLON = auto()
    VALUE = auto()  # before a member's value
    IN_KEY = auto()
    IN_VALUE = auto()
    AFTER_VALUE = auto()
    DONE = auto()
    MALFORMED = auto()


class CallObject:
    """The state of one object.

    written: all of it so far, until a piece of the call has gone out. has_begun: whether one has.
    names: no other name makes a call; None: any does. needs_arguments: so does no object without them.
    """

    __slots__ = (
        "_arguments",
        "_at",
        "_end",
        "_key",
        "_name",
        "_names",
        "_needs_arguments",
        "_value",
        "has_begun",
        "index",
        "written",
    )

    def __init__(self, index: int, names: Collection[str] | None = None, *, needs_arguments: bool = False):
        self.index = index
        self.written = ""
        self.has_begun = False
        self._names = names
        self._needs_arguments = needs_arguments
        self._at = _At.BEGIN
        self._end = ValueEnd()
        self._key = ""
        self._value = ""
        self._name: str | None = None
        self._arguments: str | None = None

    @property
    def is_done(self) -> bool:
        """It has ended, and was a call."""
        return self._at is _At.DONE

    @property
    def is_malformed(self) -> bool:
        return self._at is _At.MALFORMED

    @property
    def has_ended(self) -> bool:
        return self._at in (_At.DONE, _At.MALFORMED)

    def push(self, text: str, start: int) -> tuple[int, list[CallPiece]]:
        """Read on in `text` from `start`; where this object's reading ends, and what goes out.

        It ends within the text only where the object is done, or at the character that is malformed.
        """
        pieces: list[CallPiece] = []
        position = start
        while position < len(text) and not self.has_ended:
            if self._at in (_At.IN_KEY, _At.IN_VALUE):
                stop = self._end.push(text, position)
                self._take(text[position:stop], pieces)
                position = stop
                if self._end.is_at_end:
                    self._close(pieces)
                continue
            if text[position] not in WHITE_SPACE:
                position += self._step(text[position], pieces)
            else:
                position += 1
        if not self.has_begun:
            self.written += text[start:position]
        return position, pieces

    def _step(self, character: str, pieces: list[CallPiece]) -> int:
        """Between values; how many characters that takes: none if a value begins here or nothing fits."""
        match self._at, character:
            case _At.BEGIN, "{":
                self._at = _At.KEY
            case _At.KEY, '"':
                self._begin(_At.IN_KEY)
                return 0
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, _ if character not in ",}]:":
                self._begin(_At.IN_VALUE)
                if self._streams(character):
                    self._send("", pieces)
                return 0
            case _At.AFTER_VALUE, ",":
                self._at = _At.KEY
            case ((_At.AFTER_VALUE | _At.KEY), "}"):
                return self._finish(pieces)
            case _:
                self._at = _At.MALFORMED
                return 0
        return 1

    def _begin(self, at: _At) -> None:
        self._at, self._end, self._value = at, ValueEnd(), ""

    def _streams(self, first: str) -> bool:
        """Whether the value that begins with `first` goes out as it comes."""
        return self._is_arguments and first == "{" and self._is_named and not self.has_begun

    @property
    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_MEMBERS

    @property
    def _is_named(self) -> bool:
        return self._name is not None and (self._names is None or self._name in self._names)

    def _take(self, part: str, pieces: list[CallPiece]) -> None:
        if self._at is _At.IN_VALUE and self.has_begun and self._arguments is None:
            if part:
                self._send(part, pieces)
        else:
            self._value += part

    def _close(self, pieces: list[CallPiece]) -> None:
        """A key or a value has ended."""
        if self._at is _At.IN_KEY:
            self._key, self._at = _text_of(self._value) or "", _At.COLON
            return
        self._at = _At.AFTER_VALUE
        if self.has_begun and self._arguments is None:
            self._arguments = ""  # sent already
        elif self._key == "name" and self._name is None:
            self._name = _text_of(self._value)
        elif self._is_arguments and self._arguments is None:
            self._arguments = _arguments_of(self._value)
            if self._arguments is None:
                self._at = _At.MALFORMED

    def _finish(self, pieces: list[CallPiece]) -> int:
        """At the closing brace."""
        if self.has_begun:
            self._at = _At.DONE
        elif self._is_named and not (self._needs_arguments and self._arguments is None):
            self._send("{}" if self._arguments is None else self._arguments, pieces)
            self._at = _At.DONE
        else:
            self._at = _At.MALFORMED
            return 0
        return 1

    def _send(self, arguments: str, pieces: list[CallPiece]) -> None:
        name = None if self.has_begun else self._name
        self.has_begun = True
        pieces.append(CallPiece(self.index, name, arguments))


def _text_of(value: str) -> str | None:
    """The text that a JSON string stands for; None if it is not one."""
    found = _parsed(value)
    return found if isinstance(found, str) and _is_text(found) else None


def _is_text(value: str) -> bool:
    """Whether it can be sent: escapes of JSON may stand for halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _arguments_of(value: str) -> str | None:
    """Arguments as the text of a JSON object; None if they are not one, nor one within a string."""
    found = _parsed(value)
    if found is None and value.strip() == "null":
        return "{}"
    if isinstance(found, str):
        return found if _is_text(found) and isinstance(_parsed(found), dict) else None
    return value.strip() if isinstance(found, dict) else None


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None

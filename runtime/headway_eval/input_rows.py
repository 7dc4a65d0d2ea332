"""Reads JSON lines of a file that the user named, and says which line and field is wrong."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headway_eval.errors import InputFileError

LONGEST_SHOWN = 80
# Those of requests. Most templates pass over others without a word.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file. flag: what the user named the file by."""

    flag: str
    path: Path
    line: int
    fields: Mapping[str, Any]

    @property
    def place(self) -> str:
        return f"{self.flag}={str(self.path)!r}, line {self.line}"

    def wrong(self, field: str, remedy: str) -> InputFileError:
        return InputFileError(f"{self.place}: {field}={shown(self.fields.get(field))}: {remedy}")

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if not isinstance(value, str) or not value:
            raise self.wrong(field, "want a text that is not empty")
        return value

    def messages(self) -> list[dict[str, Any]]:
        """Each with a role and content; a call of tools stands for content."""
        value = self.fields.get("messages")
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise self.wrong("messages", "want a list of objects with role and content")
        for number, message in enumerate(value):
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise self._wrong_in(number, "role", message, f"want one of {', '.join(ROLES)}")
            if content is None and not (role == "assistant" and message.get("tool_calls")):
                raise self._wrong_in(number, "content", message, "want a text, or a list of text parts")
        return value

    def _wrong_in(self, number: int, field: str, message: Mapping[str, Any], remedy: str) -> InputFileError:
        given = f"={shown(message[field])}" if field in message else " is missing"
        return InputFileError(f"{self.place}: messages[{number}].{field}{given}: {remedy}")

    def only_one_of(self, first: str, second: str) -> str:
        """Which of two fields there is."""
        present = [name for name in (first, second) if self.fields.get(name) is not None]
        if len(present) != 1:
            raise InputFileError(
                f"{self.place}: has {' and '.join(present) or 'neither'}; want either {first} or {second}"
            )
        return present[0]

    def refuse_unknown(self, known: tuple[str, ...]) -> None:
        for name in self.fields:
            if name not in known:
                near = get_close_matches(name, known, 1)
                remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise self.wrong(name, remedy)


def read_text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(
            f"{flag}={str(path)!r}: cannot be read ({error}); name a file of UTF-8 text"
        ) from error


def read_rows(flag: str, path: Path) -> Iterator[Row]:
    """The objects of a file of JSON lines, in order; empty lines are passed over."""
    # Not splitlines(), which also cuts at characters that may stand inside of a JSON text.
    for number, line in enumerate(read_text(flag, path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputFileError(
                f"{flag}={str(path)!r}, line {number}: {shown(line)} is not JSON ({error}); "
                "write one object on each line"
            ) from error
        if not isinstance(fields, dict):
            raise InputFileError(
                f"{flag}={str(path)!r}, line {number}: {shown(fields)} is no object; write one on each line"
            )
        yield Row(flag, path, number, fields)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."

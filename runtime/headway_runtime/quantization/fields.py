"""Reading one JSON object of a quantization configuration, field by field, until nothing is left unread."""

import re
from collections.abc import Mapping
from typing import TypeVar

from headway_runtime.errors import ModelLoadError

Choice = TypeVar("Choice", bound=str | int)

UNQUANTIZED = "serve the model without quantization"


class Fields:
    """An object whose every field is read or known to change nothing; a null counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._left = set(self._values)
        self.where = where

    @property
    def field_names(self) -> list[str]:
        return list(self._values)

    def error(self, name: str, remedy: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {name}={self._values.get(name)!r}: {remedy}")

    def get(self, name: str, default: object = None) -> object:
        self._left.discard(name)
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "want an integer; correct the model's file")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "want true or false; correct the model's file")
        return value

    def choice(self, name: str, choices: tuple[Choice, ...], default: Choice | None = None) -> Choice:
        """One of a few; capitals do not matter."""
        value = self.get(name, default)
        lowered = value.lower() if isinstance(value, str) else value
        for choice in choices:
            if lowered == choice and not isinstance(value, bool):
                return choice
        names = ", ".join(map(repr, choices))
        raise self.error(name, f"supported: {names}; quantize the model anew so, or {UNQUANTIZED}")

    def names(self, *names: str) -> list[str]:
        """The strings of the first of these lists that is there."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise self.error(name, "want a list of names; correct the model's file")
            return value
        return []

    def object(self, name: str) -> "Fields | None":
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "want an object; correct the model's file")
        return Fields(value, f"{self.where}: {name}")

    def pattern(self, name: str, text: str) -> re.Pattern[str]:
        """A regular expression that stands in the field of that name."""
        try:
            return re.compile(text)
        except re.error as error:
            raise self.error(
                name, f"{text!r} is no regular expression ({error}); correct the model's file"
            ) from error

    def group_size(self, name: str) -> int | None:
        """Positive, or None for -1: all inputs are one group."""
        size = self.integer(name)
        if size == -1:
            return None
        if size < 1:
            raise self.error(
                name, "want a positive number of inputs, or -1 for all; correct the model's file"
            )
        return size

    def block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of a block."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str):  # "128x128"
            value = [int(part) if part.isdigit() else part for part in value.split("x")]
        match value:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        raise self.error(name, "want two positive numbers, rows and columns; correct the model's file")

    def finish(self, harmless: frozenset[str]) -> None:
        """What was not read must be known to change nothing, or say nothing."""
        for name in sorted(self._left - harmless):
            if self._values[name] not in (False, 0, "", [], {}):
                raise self.error(
                    name,
                    "this field is unknown here and may change what weights mean; take it out of the file if "
                    f"it does not, or {UNQUANTIZED}",
                )

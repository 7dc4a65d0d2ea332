"""One line of a trace by its fields. What cannot be is an error that names file, line, field and value."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

MOST_TOKENS = 1 << 24


class TraceFileError(Exception):
    """A trace file is not what it was named as; the text names the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Line:
    """called: the file. is_json: numbers are numbers and no text."""

    called: str
    line_number: int
    fields: Mapping[str, Any]
    is_json: bool = False

    @property
    def place(self) -> str:
        """The file and the line."""
        return f"{self.called}, line {self.line_number}"

    def value(self, field: str) -> Any:
        """What must be there."""
        found = self.fields.get(field)
        if found is None:
            raise TraceFileError(f"{self.place}: {field} is missing; write it, or leave the line out")
        return found

    def error(self, field: str, wanted: str) -> TraceFileError:
        """That a field is not what is wanted."""
        return TraceFileError(
            f"{self.place}: {field}={self.fields[field]!r:.80} is not {wanted}; "
            "correct it, or leave the line out"
        )

    def has_only(self, known: Set[str]) -> None:
        """Raises for a field that is none of these."""
        unknown = sorted(self.fields.keys() - known)
        if unknown:
            raise TraceFileError(f"{self.place}: {unknown[0]} is no field of this format; remove it")

    def number(self, field: str, lowest: float = -math.inf) -> float:
        """A finite one, from `lowest` on."""
        found = self.value(field)
        try:
            if self.is_json and type(found) not in (int, float):
                raise TypeError("a number in JSON is neither text nor true")
            value = float(found)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._no_number(field, lowest) from error
        if not math.isfinite(value) or value < lowest:
            raise self._no_number(field, lowest)
        return value

    def _no_number(self, field: str, lowest: float) -> TraceFileError:
        least = "" if math.isinf(lowest) else f" from {lowest:g} on"
        return self.error(field, f"a finite number{least}")

    def tokens(self, field: str, least: int = 1) -> int:
        """A length."""
        value = self.number(field, least)
        if value != int(value) or value > MOST_TOKENS:
            raise self.error(field, f"a whole number up to {MOST_TOKENS}")
        return int(value)

    def recorded_tokens(self, field: str) -> int:
        """Published traces hold a few requests of no tokens, which no server takes; they count as 1."""
        return max(1, self.tokens(field, least=0))

    def hash_ids(self) -> tuple[int, ...]:
        """Of the prompt's blocks, where they are known; null says that they are not."""
        found = self.fields.get("hash_ids")
        if found is None:
            return ()
        if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
            raise self.error("hash_ids", "a list of integers from 0 on")
        return tuple(found)

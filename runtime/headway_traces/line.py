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
    """place: the file and the line. is_json: numbers are numbers and no text."""

    place: str
    fields: Mapping[str, Any]
    is_json: bool = False

    def value(self, field: str) -> Any:
        """What must be there."""
        if self.fields.get(field) is None:
            raise TraceFileError(f"{self.place}: {field} is missing; write it, or leave the line out")
        return self.fields[field]

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
        wanted = "a finite number" if math.isinf(lowest) else f"a finite number from {lowest:g} on"
        found = self.value(field)
        if isinstance(found, bool) or (self.is_json and not isinstance(found, int | float)):
            raise self.error(field, wanted)
        try:
            value = float(found)
        except (ValueError, TypeError, OverflowError) as error:
            raise self.error(field, wanted) from error
        if not math.isfinite(value) or value < lowest:
            raise self.error(field, wanted)
        return value

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

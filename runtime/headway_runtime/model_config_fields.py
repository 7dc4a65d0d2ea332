"""One JSON object of a model's files, read with checks. Knows no field's meaning, and imports no torch."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway_runtime.errors import ModelLoadError

# No tensor has a side of more, and no float is larger.
MOST_INTEGER = 2**31 - 1
MOST_NUMBER = sys.float_info.max


class _Watched(Mapping[str, object]):
    """Values, and the names that somebody asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.asked.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Fields:
    """values: as the file has them. defaults: of fields that it leaves out.

    A null counts as left out, but in the `optional_` methods, where it says that there is none.
    """

    def __init__(
        self, values: Mapping[str, object], where: str, defaults: Mapping[str, object] | None = None
    ) -> None:
        self.values = _Watched({name: value for name, value in values.items() if value is not None})
        self.raw = values
        self.where = where
        self._nulls = values.keys() - self.values.keys()
        self._defaults = defaults or {}

    @property
    def unread(self) -> set[str]:
        """Names of fields that say something and that nobody has asked for."""
        return self.values.keys() - self.values.asked

    def get(self, name: str) -> object:
        """None where it is left out and has no default."""
        return self.values.get(name, self._defaults.get(name))

    def error(self, name: str, remedy: str) -> ModelLoadError:
        value = None if name in self._nulls else self.get(name)
        return ModelLoadError(f"{self.where}: {name}={value!r}: {remedy}")

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST_INTEGER
    ) -> int:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"{least} or more"
            raise self.error(name, f"want {kind}; correct the model's file")
        if value > most:
            raise self.error(name, f"want at most {most}; correct the model's file")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        # JSON's integers may have any number of digits, and Python's JSON has an Infinity.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MOST_NUMBER:
            raise self.error(name, "want a positive number; correct the model's file")
        return float(value)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "want true or false; correct the model's file")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._is_none(name) else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        return None if self._is_none(name) else self.number(name)

    def entries(self, name: str) -> list[object] | None:
        """A list; None where it is left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "want a list; correct the model's file")
        return value

    def object(self, name: str) -> dict[str, object]:
        """A JSON object; empty where it is left out."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "want an object; correct the model's file")
        return value

    def _is_none(self, name: str) -> bool:
        return name in self._nulls or self.get(name) is None


def read_object(path: Path) -> dict[str, object]:
    """One of the model's JSON files. ModelLoadError if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path}: cannot be read ({error}); give a folder in Hugging Face layout"
        ) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds no JSON object; give a folder in Hugging Face layout")
    return value

"""All that tuning has measured, on disk as soon as it is, so that another run goes on where one was cut.

Knows no kernel. What was found on another GPU or with another compiler does not count: it is set aside.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.kept_file import keep, set_aside

Values = Mapping[str, int]
Measured = dict[str, Any]


@dataclass(slots=True)
class State:
    """found: by kernel, class and candidate. crossovers: by form; see `crossover`.

    A candidate has the microseconds of each case, or why it is out.
    """

    file: Path
    conditions: dict[str, Any]
    found: dict[str, dict[str, dict[str, Measured]]] = field(default_factory=dict)
    crossovers: dict[str, Measured] = field(default_factory=dict)

    @classmethod
    def opened(cls, file: Path, conditions: dict[str, Any]) -> "State":
        if not file.is_file():
            return cls(file, conditions)
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            if told["conditions"] == conditions:
                return cls(file, conditions, told["found"], told["crossovers"])
            why = f"measured under other conditions, {told['conditions']}"
        except (ValueError, KeyError, TypeError) as error:
            why = f"it cannot be read ({type(error).__name__}: {error})"
        set_aside(file, why)
        return cls(file, conditions)

    def of(self, kernel: str, shape_class: str) -> dict[str, Measured]:
        return self.found.setdefault(kernel, {}).setdefault(shape_class, {})

    def crossover(self, form: str, entries: Mapping[str, Values]) -> dict[str, Measured]:
        """By the number of rows, what was measured with these entries; with any others it does not count."""
        kept = self.crossovers.get(form)
        if kept is None or kept["entries"] != entries:
            kept = self.crossovers[form] = {"entries": dict(entries), "rows": {}}
        rows: dict[str, Measured] = kept["rows"]
        return rows

    def keep(self) -> None:
        keep(self.file, {"conditions": self.conditions, "found": self.found, "crossovers": self.crossovers})


def key_of(values: Values) -> str:
    return json.dumps(dict(sorted(values.items())))

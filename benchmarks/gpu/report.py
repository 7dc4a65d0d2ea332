"""What was found, row by row: printed and written to the JSON at once, so that a cut loses none.

Owns the clock of the whole run: a row is begun only while there is time left for it.
"""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Report:
    """One file and one table of all stages."""

    def __init__(self, out: Path, conditions: Row, seconds: float) -> None:
        """seconds: for everything, from now on."""
        self._out = out
        self._began_at = time.monotonic()
        self._seconds = seconds
        self.found: Row = {"conditions": conditions, "rows": []}
        self.write()

    @property
    def seconds_left(self) -> float:
        """Until the time is up."""
        return self._seconds - (time.monotonic() - self._began_at)

    @property
    def rows(self) -> list[Row]:
        """So far."""
        rows: list[Row] = self.found["rows"]
        return rows

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and no check found anything wrong."""
        return all(row.get("is_right", True) and "error" not in row for row in self.rows)

    def row(
        self, stage: str, name: str, measure: Callable[[], Row], *, needs_seconds: float = 20.0
    ) -> Row | None:
        """Measure one row, print and keep it. None, and a line that says so, where the time is short.

        A row that fails says why, and the others are measured all the same.
        """
        if self.seconds_left < needs_seconds:
            print(
                f"{stage} | {name} | left out: {self.seconds_left:.0f} s left, it wants {needs_seconds:.0f}"
            )
            self.found.setdefault("left_out", []).append(name)
            self.write()
            return None
        began_at = time.monotonic()
        try:
            row = {"stage": stage, "name": name, **measure()}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
            row = {"stage": stage, "name": name, "error": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
        row["seconds"] = time.monotonic() - began_at
        self.rows.append(row)
        self.write()
        cells = [f"{key} {_shown(value)}" for key, value in row.items() if key not in ("stage", "name")]
        print(f"{stage} | {name} | {', '.join(cells)}", flush=True)
        return row

    def write(self) -> None:
        """As it is now."""
        self.found["total_seconds"] = time.monotonic() - self._began_at
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        part.replace(self._out)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)

"""What was found, row by row: printed and written to the JSON at once, so that a cut loses none.

Owns the clock of a run: a row is begun only while there is time left for it, and a long one is told when the
time is up. Owns the file, which all runs on one GPU share: it lists `runs` (conditions, date, seconds) and
`rows`, each with the number of its run. A row stays until a later run has measured it anew, and what a later
whole run of its stage no longer has is gone. A file of another GPU, or one that cannot be read, is renamed.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.kept_file import keep, set_aside

Row = dict[str, Any]
# What an iterator gives is the row as far as it goes: each is written in place of the one before.
Measure = Callable[[], Row | Iterator[Row]]

# What every run measures beside its stages.
MACHINE = "machine"


class TimeUp(Exception):  # noqa: N818 (nothing went wrong)
    """Raised within a row that nothing can be said of before its end."""


class DeviceLost(Exception):  # noqa: N818 (what was lost, not what went wrong)
    """Raised behind a row after which nothing more can be measured in this process."""


class Report:
    """One file and one table of all stages, to which one run adds."""

    def __init__(
        self,
        out: Path,
        conditions: Row,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        """seconds: for everything, from now on. works: whether the device does, asked when a row is wrong."""
        self._out, self._clock, self._works = out, clock, works
        self._began_at = clock()
        self._until = self._began_at + seconds
        runs, rows = _opened(out, conditions.get("device"))
        self._number = max((run["number"] for run in runs), default=-1) + 1
        self.run: Row = {
            "number": self._number,
            "conditions": conditions,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "left_out": [],
        }
        self._runs, self._rows = [*runs, self.run], rows
        self._unfinished: Row | None = None
        self._cut: set[str] = set()
        self.goals: list[Row] = []
        self.write()

    @property
    def seconds_left(self) -> float:
        """Until the time is up."""
        return self._until - self._clock()

    @property
    def runs(self) -> list[Row]:
        """Of all rows, this one the last."""
        return self._runs

    @property
    def rows(self) -> list[Row]:
        """All there are, of earlier runs too."""
        return self._rows

    @property
    def own_rows(self) -> list[Row]:
        """Of this run."""
        return [row for row in self._rows if row["run"] == self._number]

    @property
    def num_measured(self) -> int:
        """Rows of stages that this run has measured."""
        return sum(row["stage"] != MACHINE for row in self.own_rows)

    @property
    def is_right(self) -> bool:
        """Whether nothing of this run failed and no check found anything wrong."""
        return all(row.get("is_right", True) and "error" not in row for row in self.own_rows)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Meanwhile there are no more than so many seconds from now on."""
        before = self._until
        self._until = min(before, self._clock() + seconds)
        try:
            yield
        finally:
            self._until = before

    def check_time(self) -> None:
        """TimeUp if there is none left."""
        if self.seconds_left <= 0:
            raise TimeUp("the time was up before it was done")

    def row(self, stage: str, name: str, measure: Measure, *, needs_seconds: float = 20.0) -> Row | None:
        """Measure one row, print and keep it. None, and a line that says so, where the time is short.

        A row that fails says why, and the others are measured all the same. DeviceLost where none can be:
        rows of earlier runs shall not give way to failures that say nothing of them.
        """
        if self.seconds_left < needs_seconds:
            why = f"{max(0.0, self.seconds_left):.0f} s left, it wants {needs_seconds:.0f}"
            self._leave_out(stage, name, why)
            return None
        began_at = self._clock()
        row: Row = {"stage": stage, "name": name, "run": self._number}
        try:
            found = measure()
            if isinstance(found, dict):
                row |= found
            else:
                for part in found:
                    row |= part
                    self._unfinished = row | {"is_unfinished": True, "seconds": self._clock() - began_at}
                    self.write()
        except TimeUp as cut:
            if self._unfinished is None:
                self._leave_out(stage, name, str(cut))
                return None
            row["is_unfinished"] = True
            self.cut_short(stage)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
            row["error"] = _told(error)
            traceback.print_exc()
        self._unfinished = None
        row["seconds"] = self._clock() - began_at
        self._keep(row)
        if ("error" in row or not row.get("is_right", True)) and not self._works():
            self.cut_short(stage)
            raise DeviceLost(f"the device does not work any more after {stage} | {name}")
        return row

    def fail(self, stage: str, error: Exception) -> None:
        """A row for what failed outside of all rows."""
        self.cut_short(stage)
        name = f"{stage}, outside of its rows"
        self._keep({"stage": stage, "name": name, "run": self._number, "error": _told(error)})

    def finish(self, stage: str) -> None:
        """Where all of a stage was measured now, what earlier runs alone have of it is no part of it."""
        if stage in self._cut:
            return
        self._rows = [row for row in self._rows if row["stage"] != stage or row["run"] == self._number]
        self.write()

    def cut_short(self, stage: str) -> None:
        """Not all of the stage is measured, by intent or for want of time: its other rows stay."""
        self._cut.add(stage)

    def write(self) -> None:
        """As it is now."""
        self.run["total_seconds"] = self._clock() - self._began_at
        rows = [*self._rows, *([self._unfinished] if self._unfinished else [])]
        told = {row["run"] for row in rows} | {self._number}
        runs = [run for run in self._runs if run["number"] in told]
        keep(self._out, {"runs": runs, "rows": rows, "goals": self.goals})

    def _keep(self, row: Row) -> None:
        """In place of the same row of before."""
        same = (row["stage"], row["name"])
        self._rows = [one for one in self._rows if (one["stage"], one["name"]) != same]
        self._rows.append(row)
        self.write()
        cells = [
            f"{key} {_shown(value)}" for key, value in row.items() if key not in ("stage", "name", "run")
        ]
        print(f"{row['stage']} | {row['name']} | {', '.join(cells)}", flush=True)

    def _leave_out(self, stage: str, name: str, why: str) -> None:
        print(f"{stage} | {name} | left out: {why}", flush=True)
        self.run["left_out"].append(name)
        self.cut_short(stage)
        self.write()


def _opened(out: Path, device: str | None) -> tuple[list[Row], list[Row]]:
    """Runs and rows of before; none where the file is another device's, or cannot be read."""
    if not out.is_file():
        return [], []
    try:
        told = json.loads(out.read_text(encoding="utf-8"))
        runs, rows = told["runs"], told["rows"]
        devices = {run["conditions"].get("device") for run in runs if isinstance(run["number"], int)}
        is_whole = all({"stage", "name", "run"} <= set(row) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it cannot be read ({type(error).__name__}: {error})"
    else:
        if is_whole and devices <= {device}:
            return runs, rows
        why = f"it is of {_listed(devices)}, this is {device}" if is_whole else "its rows are none of a run's"
    set_aside(out, why)
    return [], []


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _listed(devices: Iterable[object]) -> str:
    return ", ".join(sorted(str(one) for one in devices))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)

"""Headway on another draw of each load: its constants were chosen on the draws that everybody else meets.

The same parts of the same recordings and the same made-up courses, with another seed: other copies or another
choice of a recording's requests, other arrivals and lengths where they are made up. What it attains and costs
there was not looked at when a constant was chosen; that it is of the same recordings stays.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.slo import work
from benchmarks.slo.plan import Plan, Task
from benchmarks.slo.work import Row

# Added to the plan's.
SEEDS_ON = 1000


def done(plan: Plan, task: Task, files: Mapping[str, Path]) -> list[Row]:
    """The result of a task of kind `draw`."""
    rows = work.done(drawn(plan), as_headway(task), files)
    return [{**row, "kind": task.kind} for row in rows]


def drawn(plan: Plan) -> Plan:
    """With the other seed."""
    return replace(plan, seed=plan.seed + SEEDS_ON)


def as_headway(task: Task) -> Task:
    """The task that meets the first draw."""
    return replace(task, kind="headway")

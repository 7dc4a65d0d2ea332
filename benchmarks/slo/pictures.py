"""A picture for each load: attainment over GPU-hours of all controllers, a panel for each promise."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.slo.goals import Table, table_of
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write LOAD.svg for each load that has results: all controllers, and the Pareto front of all but the
    oracle, who knows all arrivals."""
    table = table_of(rows)
    # Without ids and dates drawn by chance, the same results give the same file.
    with rc_context({"svg.hashsalt": "headway"}):
        for load in dict.fromkeys(case[0] for case in table.headway):
            _figure(table, load).savefig(folder / f"{load}.svg", metadata={"Date": None})


def _figure(table: Table, load: str) -> Figure:
    cases = sorted((case for case in table.headway if case[0] == load), key=lambda one: (-one[1], one[2]))
    figure = Figure(figsize=(5 * len(cases), 4.5), layout="constrained")
    for axis, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        axis.set(
            title=f"{load}, targets {case[1]:g}x idle, P{case[2]}", xlabel="GPU-hours", ylabel="attained, %"
        )
        axis.axhline(case[2], color="black", linestyle="--", linewidth=0.8)
        axis.grid(alpha=0.3)
        _points(axis, [table.headway[case]], "headway", "o")
        if case in table.oracle:
            _points(axis, [table.oracle[case]], "oracle", "*")
        others = table.baselines.get(case, [])
        for row in others:
            _points(axis, [row], row["controller"], "x")
        ends = front([table.headway[case], *others])
        axis.step(*zip(*ends, strict=True), where="post", color="gray", linewidth=0.8, label="Pareto front")
        axis.legend(fontsize="x-small")
    return figure


def front(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """GPU-hours and percent attained of those that none of the others beats in both, the cheapest first."""
    found: list[tuple[float, float]] = []
    for cost, attained in sorted(map(_place, rows), key=lambda one: (one[0], -one[1])):
        if not found or attained > found[-1][1]:
            found.append((cost, attained))
    return found


def _place(row: Row) -> tuple[float, float]:
    return row["measures"]["gpu_hours"], 100 * row["measures"]["joint_attainment"]


def _points(axis: Axes, rows: Sequence[Row], label: str, marker: str) -> None:
    axis.plot(*zip(*map(_place, rows), strict=True), marker, label=label)

"""The tables: results.md and results.json; losses stand as plainly as wins. Simulates nothing."""

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.slo.loads import LOADS
from benchmarks.slo.plan import JUDGED_FAULTS, Plan

MOST_COST = 1.25
MOST_REVERSALS = 2.0
MOST_FAULT_LOSS = 0.01
LEAST_ORACLE_REPLICAS = 8.0

Row = Mapping[str, Any]
Case = tuple[str, float, int]


@dataclass(frozen=True, slots=True)
class Goal:
    """missed: of `count` cases those that do not reach it, each in words."""

    name: str
    count: int
    missed: list[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by case and by who was in control; faults apart."""

    oracle: Mapping[Case, Row]
    headway: Mapping[Case, Row]
    baselines: Mapping[Case, list[Row]]
    faults: Mapping[Case, list[Row]]


def write(plan: Plan, rows: Sequence[Row], folder: Path) -> None:
    """Both files."""
    table = table_of(rows)
    goals = goals_of(table)
    data = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "plan": asdict(plan),
        "goals": [asdict(one) for one in goals],
        "rows": list(rows),
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text("\n".join(_lines(plan, table, goals, rows)) + "\n", encoding="utf-8")


def table_of(rows: Iterable[Row]) -> Table:
    """Sorted out."""
    oracle: dict[Case, Row] = {}
    headway: dict[Case, Row] = {}
    baselines: dict[Case, list[Row]] = {}
    faults: dict[Case, list[Row]] = {}
    for row in rows:
        case = (row["load"], row["slo_factor"], row["percentile"])
        if row["kind"] == "oracle":
            oracle[case] = row
        elif row["kind"] == "baseline":
            baselines.setdefault(case, []).append(row)
        elif row["fault"]:
            faults.setdefault(case, []).append(row)
        else:
            headway[case] = row
    return Table(oracle, headway, baselines, faults)


def ratio(row: Row, oracle: Row | None) -> float | None:
    """GPU-hours over the oracle's; None without an oracle that attains the objective."""
    if oracle is None or not oracle["is_attained"]:
        return None
    return float(row["measures"]["gpu_hours"] / oracle["measures"]["gpu_hours"])


def dominates(one: Row, other: Row) -> bool:
    """No worse in attainment and in cost, and better in one of them."""
    a, b = one["measures"], other["measures"]
    is_no_worse = a["joint_attainment"] >= b["joint_attainment"] and a["gpu_hours"] <= b["gpu_hours"]
    return is_no_worse and (a["joint_attainment"], a["gpu_hours"]) != (b["joint_attainment"], b["gpu_hours"])


def goals_of(table: Table) -> list[Goal]:
    """What was promised, against what was found."""
    attained, cost, front, calm, faults = [], [], [], [], []
    num_costs = num_fronts = num_faults = 0
    for case, row in table.headway.items():
        found, name = row["measures"], _case(case)
        if found["joint_attainment"] * 100 < case[2]:
            attained.append(f"{name}: {found['joint_attainment']:.2%}")
        over = ratio(row, table.oracle.get(case))
        num_costs += over is not None
        if over is not None and over > MOST_COST:
            cost.append(f"{name}: {over:.2f} times")
        others = table.baselines.get(case, [])
        num_fronts += bool(others)
        better = [one["controller"] for one in others if dominates(one, row)]
        if better:
            front.append(f"{name}: {', '.join(better)}")
        if found["reversals_per_hour"] > MOST_REVERSALS:
            calm.append(f"{name}: {found['reversals_per_hour']:.1f}")
        for fault in table.faults.get(case, []):
            if fault["fault"] in JUDGED_FAULTS:
                num_faults += 1
                lost = found["joint_attainment"] - fault["measures"]["joint_attainment"]
                if lost > MOST_FAULT_LOSS:
                    faults.append(f"{name}, {fault['fault']}: {100 * lost:.1f} points lower")
    count = len(table.headway)
    return [
        Goal("joint attainment at or above the objective", count, attained),
        Goal(f"at most {MOST_COST:g} times the oracle's GPU-hours", num_costs, cost),
        Goal("no baseline with at least the attainment for at most the GPU-hours", num_fronts, front),
        Goal(f"at most {MOST_REVERSALS:g} reversals of replicas an hour", count, calm),
        Goal("with samples missing or a wrong model at most a point of attainment less", num_faults, faults),
    ]


def _lines(plan: Plan, table: Table, goals: Sequence[Goal], rows: Sequence[Row]) -> Iterator[str]:
    hours = sum(row["processor_seconds"] for row in rows) / 3600
    yield "# The controller against others, and against knowing everything"
    yield ""
    factors = " and ".join(f"{factor:g}" for factor in plan.slo_factors)
    yield (
        f"Simulated (docs/simulate.md), not measured on GPUs. {plan.verdict_seconds:g} s of the second half "
        f"of each load are judged, after {plan.warm_up_seconds:g} s before them. Baselines are tuned on "
        f"{plan.tuning_seconds:g} s of the first half, with at most {plan.num_candidates} candidates, and "
        "have the fixed batch limits that did best there. Headway has its defaults everywhere. Targets are "
        f"{factors} times the idle TTFT of the P99 prompt, and the idle TPOT. Joint attainment is over "
        f"arrivals; what never ended is a miss. Processor time: {hours:.1f} hours. `make bench-slo` makes "
        "this page again."
    )
    left_out = [name for name in LOADS if name not in plan.loads]
    if left_out:
        yield ""
        yield f"Not part of this run: {', '.join(left_out)}."
    yield from ("", "## Goals", "")
    yield "| goal | met | missed |"
    yield "| --- | --- | --- |"
    for goal in goals:
        missed = "; ".join(goal.missed) or ("-" if goal.count else "not measured")
        yield f"| {goal.name} | {goal.count - len(goal.missed)} of {goal.count} | {missed} |"
    for load in plan.loads:
        cases = [case for case in table.headway if case[0] == load]
        if cases:
            yield from ("", f"## {load}", "")
            yield f"![attainment over cost]({load}.svg)"
        for case in sorted(cases, key=lambda one: (-one[1], one[2])):
            yield from _case_lines(case, table)


def _case_lines(case: Case, table: Table) -> Iterator[str]:
    oracle = table.oracle.get(case)
    yield from ("", f"### {_case(case)}", "")
    if oracle is not None:
        found = oracle["measures"]
        if not oracle["is_attained"]:
            best = f"{found['joint_attainment']:.2%}"
            yield from (f"No schedule found attains the objective; the best has {best}.", "")
        elif found["mean_replicas"] < LEAST_ORACLE_REPLICAS:
            few = f"The oracle has {found['mean_replicas']:.1f} replicas on average"
            yield from (f"{few}: at so few a ratio is rounding in part.", "")
    yield (
        "| controller | attained | worst 5 min | GPU-hours | over oracle | actions/h | reversals/h "
        "| recovery, s | rejected, lost, unfinished |"
    )
    yield "| --- |" + " --- |" * 8
    rows = [table.headway[case], *table.faults.get(case, [])]
    others = sorted(table.baselines.get(case, []), key=lambda row: -row["measures"]["joint_attainment"])
    for row in (*([oracle] if oracle else []), *rows, *others):
        yield _table_row(row, oracle, table.headway[case])


def _table_row(row: Row, oracle: Row | None, headway: Row) -> str:
    found = row["measures"]
    name = row["controller"] if not row["fault"] else f"headway, {row['fault']}"
    if row["kind"] == "baseline" and dominates(row, headway):
        name += " (better than headway)"
    if row["kind"] == "headway" and not row["fault"]:
        name = "**headway**"
    over = ratio(row, oracle)
    cells = (
        f"{found['joint_attainment']:.2%}",
        "-" if found["worst_five_minutes"] is None else f"{found['worst_five_minutes']:.1%}",
        f"{found['gpu_hours']:.2f}",
        "-" if over is None else f"{over:.2f}",
        f"{found['actions_per_hour']:.0f}",
        f"{found['reversals_per_hour']:.1f}",
        "-" if found["recovery_seconds"] is None else f"{found['recovery_seconds']:.0f}",
        f"{found['num_rejected']}, {found['num_lost']}, {found['num_unfinished']}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def _case(case: Case) -> str:
    return f"{case[0]}, {case[1]:g}x, P{case[2]}"

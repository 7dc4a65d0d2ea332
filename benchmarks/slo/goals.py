"""Rows sorted by case, and the goals that they are held against. Writes nothing."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.slo.plan import START_FAULTS, TOLD_FAULTS

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

    @property
    def verdict(self) -> str:
        if not self.count:
            return "not measured"
        return "missed" if self.missed else "met"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by case and by who was in control; faults apart, Headway told of a jump, on another draw, and over
    a longer time."""

    oracle: Mapping[Case, Row]
    headway: Mapping[Case, Row]
    baselines: Mapping[Case, list[Row]]
    faults: Mapping[Case, list[Row]]
    longer: Mapping[Case, Row]
    told: Mapping[Case, Row]
    draws: Mapping[Case, Row]


def table_of(rows: Iterable[Row]) -> Table:
    """Sorted out."""
    oracle: dict[Case, Row] = {}
    headway: dict[Case, Row] = {}
    baselines: dict[Case, list[Row]] = {}
    faults: dict[Case, list[Row]] = {}
    longer: dict[Case, Row] = {}
    told: dict[Case, Row] = {}
    draws: dict[Case, Row] = {}
    for row in rows:
        case = (row["load"], row["slo_factor"], row["percentile"])
        if row["kind"] == "oracle":
            oracle[case] = row
        elif row["kind"] == "baseline":
            baselines.setdefault(case, []).append(row)
        elif row["kind"] == "long":
            longer[case] = row
        elif row["kind"] == "told":
            told[case] = row
        elif row["kind"] == "draw":
            draws[case] = row
        elif row["fault"]:
            faults.setdefault(case, []).append(row)
        else:
            headway[case] = row
    return Table(oracle, headway, baselines, faults, longer, told, draws)


def ratio(row: Row, oracle: Row | None) -> float | None:
    """GPU-hours over the oracle's; None without an oracle that attains the objective."""
    if oracle is None or not oracle["is_attained"]:
        return None
    return float(row["measures"]["gpu_hours"] / oracle["measures"]["gpu_hours"])


def over_bound(row: Row, oracle: Row | None) -> float | None:
    """GPU-hours over those that no schedule goes below; None without an oracle, which knows the bound."""
    if oracle is None or not oracle["least_gpu_hours"]:
        return None
    return float(row["measures"]["gpu_hours"] / oracle["least_gpu_hours"])


def dominates(one: Row, other: Row) -> bool:
    """No worse in attainment and in cost, and better in one of them."""
    a, b = one["measures"], other["measures"]
    is_no_worse = a["joint_attainment"] >= b["joint_attainment"] and a["gpu_hours"] <= b["gpu_hours"]
    return is_no_worse and (a["joint_attainment"], a["gpu_hours"]) != (b["joint_attainment"], b["gpu_hours"])


def attains(row: Row) -> bool:
    """Whether a run kept its objective."""
    return bool(row["measures"]["joint_attainment"] * 100 >= row["percentile"])


def cheaper(baselines: Iterable[Row], headway: Row) -> list[Row]:
    """Those that attain the objective for fewer GPU-hours than Headway has, whether or not it attains it."""
    hours = headway["measures"]["gpu_hours"]
    return [one for one in baselines if attains(one) and one["measures"]["gpu_hours"] < hours]


@dataclass(slots=True)
class _Costs:
    """Ratios to some oracles: how many, and which are too high."""

    count: int = 0
    missed: list[str] = field(default_factory=list)

    def add(self, name: str, over: float) -> None:
        self.count += 1
        if over > MOST_COST:
            self.missed.append(f"{name}: {over:.2f} times")


def goals_of(table: Table) -> list[Goal]:
    """What was promised, against what was found."""
    attained, front, dearer = [], [], []
    num_fronts = 0
    costs = _Costs(), _Costs(), _Costs()
    for case, row in table.headway.items():
        found, name = row["measures"], case_words(case)
        if found["joint_attainment"] * 100 < case[2]:
            told = table.told.get(case)
            also = f", told {told['measures']['joint_attainment']:.2%}" if told is not None else ""
            attained.append(f"{name}: {found['joint_attainment']:.2%}{also}")
        oracle = table.oracle.get(case)
        over = ratio(row, oracle)
        if over is not None and oracle is not None:
            whole, many, finished = costs
            whole.add(name, over)
            if oracle["measures"]["mean_replicas"] >= LEAST_ORACLE_REPLICAS:
                many.add(name, over)
            if not oracle["ended_by_budget"]:
                finished.add(name, over)
        others = table.baselines.get(case, [])
        num_fronts += bool(others)
        better = [one["controller"] for one in others if dominates(one, row)]
        if better:
            front.append(f"{name}: {', '.join(better)}")
        if less := cheaper(others, row):
            words = (f"{one['controller']} {share_of(one, row):.2f} times" for one in less)
            dearer.append(f"{name}: {', '.join(words)}")
    # In minutes one rise and fall makes many reversals an hour.
    calm = [
        f"{case_words(case)}: {row['measures']['reversals_per_hour']:.1f}"
        for case, row in table.longer.items()
        if row["measures"]["reversals_per_hour"] > MOST_REVERSALS
    ]
    drawn = [
        f"{case_words(case)}: {row['measures']['joint_attainment']:.2%}"
        for case, row in table.draws.items()
        if not attains(row)
    ]
    at_most = f"at most {MOST_COST:g} times the oracle's GPU-hours"
    whole, many, finished = costs
    return [
        Goal("joint attainment at or above the objective", len(table.headway), attained),
        Goal("the same on another draw of the load", len(table.draws), drawn),
        Goal(at_most, whole.count, whole.missed),
        Goal(f"{at_most}, of {LEAST_ORACLE_REPLICAS:g} replicas or more", many.count, many.missed),
        Goal(f"{at_most}, whose search had nothing more to try", finished.count, finished.missed),
        Goal("no baseline with at least the attainment for at most the GPU-hours", num_fronts, front),
        Goal("no baseline that attains the objective for fewer GPU-hours", num_fronts, dearer),
        Goal(
            f"at most {MOST_REVERSALS:g} reversals of replicas an hour, over a longer time",
            len(table.longer),
            calm,
        ),
        _with_faults("samples missing or a wrong model", TOLD_FAULTS, table),
        _with_faults("replicas that start sooner or later", START_FAULTS, table),
    ]


def _with_faults(words: str, names: Collection[str], table: Table) -> Goal:
    count, missed = 0, []
    for case, row in table.headway.items():
        for fault in table.faults.get(case, []):
            if fault["fault"] not in names:
                continue
            count += 1
            lost = row["measures"]["joint_attainment"] - fault["measures"]["joint_attainment"]
            if lost > MOST_FAULT_LOSS:
                missed.append(f"{case_words(case)}, {fault['fault']}: {100 * lost:.1f} points lower")
    return Goal(f"with {words} at most a point of attainment less", count, missed)


def share_of(one: Row, other: Row) -> float:
    return float(one["measures"]["gpu_hours"] / other["measures"]["gpu_hours"])


def case_words(case: Case) -> str:
    return f"{case[0]}, {case[1]:g}x, P{case[2]}"

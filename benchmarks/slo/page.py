"""The tables: results.md and results.json; losses stand as plainly as wins. Simulates nothing."""

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.slo.goals import (
    LEAST_ORACLE_REPLICAS,
    Case,
    Goal,
    Row,
    Table,
    attains,
    case_words,
    cheaper,
    dominates,
    goals_of,
    over_bound,
    ratio,
    share_of,
    table_of,
)
from benchmarks.slo.loads import ALL_LOADS, FITTED_FILE
from benchmarks.slo.plan import Plan, Task
from benchmarks.slo.told import MANY

HEADWAY_KINDS = ("headway", "told", "draw", "long")
COMMAND = "make bench-slo AZURE=FILE MOONCAKE=FILE SERVEGEN=FILE"


def write(plan: Plan, rows: Sequence[Row], folder: Path, unfinished: Sequence[Task] = ()) -> None:
    """Both files. unfinished: what of the plan has no rows yet."""
    table = table_of(rows)
    goals = goals_of(table)
    data = {
        "machine": machine_words(),
        "commit": commit_words(),
        "plan": asdict(plan),
        "goals": [{**asdict(one), "verdict": one.verdict} for one in goals],
        "unfinished": [task.words for task in unfinished],
        "rows": list(rows),
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    lines = _lines(plan, table, goals, rows, unfinished)
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def machine_words() -> str:
    """Cores, processor, Python."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def commit_words() -> str:
    """Of the code; said where that has changes that are not committed."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "operator", "runtime", ":(glob)benchmarks/slo/*.py")
    return f"{commit}, with changes that are not committed" if changed else commit or "unknown"


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    return found.stdout.strip()


def _lines(
    plan: Plan, table: Table, goals: Sequence[Goal], rows: Sequence[Row], unfinished: Sequence[Task]
) -> Iterator[str]:
    yield "# The controller against others, and against knowing everything"
    yield ""
    yield (
        f"`{COMMAND}` at commit {commit_words()}. Simulated (docs/simulate.md), not measured on GPUs: step "
        "times are published ones of Llama 3.1 8B and Llama 2 70B, and of own-step and own-wave those of our "
        "own engine on a CPU. Which numbers come out hangs on no machine. Processor time: "
        f"{'; '.join(_times(rows)) or 'none yet'}."
    )
    yield ""
    yield (
        "Headway has its defaults everywhere. Their constants were chosen on whole recordings and "
        "on the very excerpts that are judged here (docs/log.md has what was tried), as none of these was "
        "held back; *another draw* below is of the same recordings and courses, with a seed that none was "
        "chosen by. For baselines, of a trace the first half is for tuning, the second for the "
        f"verdict. Baselines are tuned with at most {plan.num_candidates} candidates, the documented "
        "default among them, and have the fixed batch limits that did best there. Targets are multiples of "
        "the idle TTFT of the P99 prompt and of the idle TPOT. Joint attainment is over arrivals; what "
        "never ended is a miss. GPU-hours count replicas that start or drain. The oracle knows all "
        f"arrivals, pays cold starts and is the cheapest of at most {plan.oracle_budget} simulated "
        "schedules; *over bound* divides by GPU-hours that no schedule that attains the objective can go "
        "below (operator/headway_simulator/least_work.py), so that the true ratio to the least cost lies "
        "between the two columns."
    )
    if table.told:
        yield ""
        yield (
            "*Told*: Headway once more on a load that jumps, asking at the first pass after the jump for "
            f"{MANY} times the replicas that it wants then, and keeping them. What misses then is no fault "
            "of how soon replicas were asked for, or of how many; what it costs says nothing."
        )
    yield from ("", "## Goals", "")
    yield "| goal | | cases that meet it | cases that miss it |"
    yield "| --- | --- | --- | --- |"
    for goal in goals:
        missed = "; ".join(goal.missed) or "-"
        yield f"| {goal.name} | {goal.verdict} | {goal.count - len(goal.missed)} of {goal.count} | {missed} |"
    yield from ("", "## Wins and losses against baselines", "")
    yield from _duels(table)
    yield from ("", "## How baselines were tuned", "")
    yield from _tuning(plan, table)
    yield from ("", "## Headway on another draw", "")
    yield from _draws(table)
    yield from ("", "## Headway over a longer time", "")
    yield from _over_longer(table)
    yield from ("", "## What was judged, and what was cut", "")
    yield from _cuts(plan, unfinished)
    for load in plan.loads:
        cases = [case for case in table.headway if case[0] == load]
        if cases:
            yield from ("", f"## {load}", "")
            yield f"![attainment over cost]({load}.svg)"
        for case in sorted(cases, key=lambda one: (-one[1], one[2])):
            yield from _case_lines(case, table)


def _times(rows: Sequence[Row]) -> Iterator[str]:
    """Hours of processor time, by machine and kind."""
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        kinds = seconds.setdefault(row.get("machine", "machines not noted"), {})
        kind = "Headway" if row["kind"] in HEADWAY_KINDS else f"{row['kind']}s"
        kinds[kind] = kinds.get(kind, 0.0) + row["processor_seconds"]
    for machine, kinds in seconds.items():
        hours = ", ".join(f"{kind} {one / 3600:.2f} h" for kind, one in kinds.items())
        yield f"{hours} on {machine}"


def _tuning(plan: Plan, table: Table) -> Iterator[str]:
    """What tuning had to choose from, and whether it could tell."""
    rows = [row for some in table.baselines.values() for row in some if row.get("tuning")]
    if not rows:
        yield "No baseline has been tuned yet."
        return
    yield (
        f"Each on a part of the first half that begins cold, of which {plan.tuning_warm_up_seconds:g} s warm "
        "up; the cheapest that attains the objective there is judged, or what comes nearest."
    )
    yield ""
    yield "| baseline | cases | none attained the objective | all candidates came out alike | chosen |"
    yield "| --- |" + " --- |" * 4
    for name in dict.fromkeys(row["controller"] for row in rows):
        own = [row for row in rows if row["controller"] == name]
        none = sum(all(not _attained(row, one) for one in row["tuning"]) for row in own)
        alike = sum(
            len({(one["joint_attainment"], one["gpu_hours"]) for one in row["tuning"]}) == 1 for row in own
        )
        chosen = Counter(_parameters(row["parameters"]) for row in own)
        words = "; ".join(f"{number} of {words}" for words, number in chosen.most_common())
        yield f"| {name} | {len(own)} | {none} | {alike} | {words} |"


def _attained(row: Row, tried: Mapping[str, Any]) -> bool:
    return bool(tried["joint_attainment"] * 100 >= row["percentile"])


def _parameters(parameters: Mapping[str, Any]) -> str:
    told = (f"{name} {value}" for name, value in parameters.items() if name != "limits" and value is not None)
    return ", ".join(told) or "its only setting"


def _draws(table: Table) -> Iterator[str]:
    """The same cases with a seed that no constant was chosen by."""
    if not table.draws:
        yield "Not run yet."
        return
    yield "| case | attained | on another draw | GPU-hours | on another draw |"
    yield "| --- |" + " --- |" * 4
    for case, row in table.draws.items():
        first = table.headway.get(case)
        cells = []
        for name, form in (("joint_attainment", ".2%"), ("gpu_hours", ".2f")):
            cells.append("-" if first is None else format(first["measures"][name], form))
            cells.append(format(row["measures"][name], form))
        yield f"| {case_words(case)} | {' | '.join(cells)} |"


def _duels(table: Table) -> Iterator[str]:
    """Of each baseline, how often it was better, worse, or neither, in attainment and cost together; and
    where it kept the objective for less."""
    won: dict[str, list[str]] = {}
    less: dict[str, list[str]] = {}
    lost: dict[str, int] = {}
    count: dict[str, int] = {}
    for case, headway in table.headway.items():
        for row in table.baselines.get(case, []):
            name = row["controller"]
            count[name] = count.get(name, 0) + 1
            lost[name] = lost.get(name, 0) + dominates(headway, row)
            if dominates(row, headway):
                won.setdefault(name, []).append(case_words(case))
            if cheaper([row], headway):
                also = "" if attains(headway) else "; Headway misses it"
                less.setdefault(name, []).append(
                    f"{case_words(case)} ({share_of(row, headway):.2f} times{also})"
                )
    if not count:
        yield "No baseline has been run yet."
        return
    yield (
        "| baseline | Headway attains no less for no more | the baseline does | neither | "
        "the baseline attains the objective for fewer GPU-hours |"
    )
    yield "| --- |" + " --- |" * 4
    for name, number in count.items():
        better = won.get(name, [])
        cells = (
            lost[name],
            _counted(better),
            number - lost[name] - len(better),
            _counted(less.get(name, [])),
        )
        yield f"| {name} | {' | '.join(map(str, cells))} |"


def _counted(cases: Sequence[str]) -> str:
    return f"{len(cases)}: {'; '.join(cases)}" if cases else "0"


def _over_longer(table: Table) -> Iterator[str]:
    """Reversals an hour want hours: rows with fewer requests, of Headway alone."""
    if not table.longer:
        yield "Not run yet."
        return
    few = sum(row["measures"]["mean_replicas"] < LEAST_ORACLE_REPLICAS for row in table.longer.values())
    yield (
        "With the shipped defaults, on fewer requests than below, so that it fits its time: "
        f"{few} of {len(table.longer)} have fewer than {LEAST_ORACLE_REPLICAS:g} replicas on average, of "
        "which each is a larger share."
    )
    yield ""
    yield "| case | minutes | replicas | attained | worst 5 min | GPU-hours | actions/h | reversals/h |"
    yield "| --- |" + " --- |" * 7
    for case, row in table.longer.items():
        found = row["measures"]
        worst = found["worst_five_minutes"]
        cells = (
            f"{row['judged_seconds'] / 60:.0f}",
            f"{found['mean_replicas']:.1f}",
            f"{found['joint_attainment']:.2%}",
            "-" if worst is None else f"{worst:.1%}",
            f"{found['gpu_hours']:.2f}",
            f"{found['actions_per_hour']:.0f}",
            f"{found['reversals_per_hour']:.1f}",
        )
        yield f"| {case_words(case)} | {' | '.join(cells)} |"


def _cuts(plan: Plan, unfinished: Sequence[Task]) -> Iterator[str]:
    yield "| load | judged, s | tuned on, s | targets and objectives |"
    yield "| --- | --- | --- | --- |"
    for load in plan.loads:
        own = plan.of(load)
        promises = ", ".join(f"{factor:g}x P{percent}" for factor, percent in own.promises)
        yield f"| {load} | {own.verdict_seconds:g} | {own.tuning_seconds:g} | {promises} |"
    factors = " and ".join(f"{factor:g}" for factor in plan.baseline_factors)
    yield ""
    promises = f"{plan.verdict_seconds:g} s and {len(plan.promises)} promises"
    if plan.is_cut:
        yield (
            f"Cut, so that it fits its time: of {promises} what this table leaves out; baselines meet "
            f"targets of {factors} times idle only, with {plan.num_candidates} candidates; faults are met "
            f"under the first {plan.num_faulty_promises} of a load's promises; made-up loads do not last an "
            "hour."
        )
        yield ""
        yield (
            "Handicaps of others that come of it: dynamo-planner's documented interval, 180 s, ends at most "
            "once in an excerpt of less than six minutes to tune on, so that its default is judged there by "
            "the replicas it begins with, and its shorter intervals (60 and 30 s) are what tuning can "
            "choose; in the verdict it acts each 180 s. HPA's and KEDA's five minutes before scaling down "
            "hardly end in such an excerpt, either, so that their other windows come out alike; and where no "
            "candidate attains the objective while replicas start, the one that is chosen is the most eager, "
            "which later keeps far more replicas than the load needs."
        )
        yield ""
    yield "Knative looks each 2 s, as it does in a cluster, all others and Headway each 5 s."
    left_out = [name for name in ALL_LOADS if name not in plan.loads]
    if left_out:
        yield ""
        yield f"Not part of this run: {', '.join(left_out)}."
    if not FITTED_FILE.is_file():
        yield ""
        yield (
            "Rows with step times fitted from our own engine (own-step, own-wave) are missing: "
            "`make bench-slo-validate`, which wants an idle machine, makes them possible."
        )
    if unfinished:
        yield ""
        yield f"**Not finished: {len(unfinished)} tasks.** {'; '.join(task.words for task in unfinished)}."


def _case_lines(case: Case, table: Table) -> Iterator[str]:
    oracle = table.oracle.get(case)
    yield from ("", f"### {case_words(case)}", "")
    yield from _oracle_lines(oracle)
    yield (
        "| controller | attained | worst 5 min | GPU-hours | over oracle | over bound | actions/h | "
        "reversals/h | recovery, s | rejected, lost, unfinished |"
    )
    yield "| --- |" + " --- |" * 9
    told = table.told.get(case)
    rows = [table.headway[case], *([] if told is None else [told]), *table.faults.get(case, [])]
    others = sorted(table.baselines.get(case, []), key=lambda row: -row["measures"]["joint_attainment"])
    for row in (*([oracle] if oracle else []), *rows, *others):
        yield _table_row(row, oracle, table.headway[case])


def _oracle_lines(oracle: Row | None) -> Iterator[str]:
    if oracle is None:
        yield from ("No oracle yet.", "")
        return
    found = oracle["measures"]
    if oracle["ended_by_budget"]:
        ended = "ended by its budget: another schedule might cost less"
    else:
        ended = "had nothing more to try"
    words = (
        f"The oracle has {found['mean_replicas']:.1f} replicas on average; its search {ended} "
        f"({oracle['num_simulated']} schedules). Bound: {oracle['least_gpu_hours']:.2f} GPU-hours."
    )
    if not oracle["is_attained"]:
        words += f" No schedule found attains the objective; the best has {found['joint_attainment']:.2%}."
    elif found["mean_replicas"] < LEAST_ORACLE_REPLICAS:
        words += f" **Fewer than {LEAST_ORACLE_REPLICAS:g} replicas: the ratio is rounding in part.**"
    yield from (words, "")


def _table_row(row: Row, oracle: Row | None, headway: Row) -> str:
    found = row["measures"]
    name = row["controller"] if not row["fault"] else f"headway, {row['fault']}"
    if row["kind"] == "baseline" and dominates(row, headway):
        name += " (better than headway)"
    if row["kind"] == "headway" and not row["fault"]:
        name = "**headway**"
    over, above = ratio(row, oracle), over_bound(row, oracle)
    if row["kind"] == "told":
        over = above = None
    cells = (
        f"{found['joint_attainment']:.2%}",
        "-" if found["worst_five_minutes"] is None else f"{found['worst_five_minutes']:.1%}",
        "-" if row["kind"] == "told" else f"{found['gpu_hours']:.2f}",
        "-" if over is None else f"{over:.2f}",
        "-" if above is None else f"{above:.2f}",
        f"{found['actions_per_hour']:.0f}",
        f"{found['reversals_per_hour']:.1f}",
        "-" if found["recovery_seconds"] is None else f"{found['recovery_seconds']:.0f}",
        f"{found['num_rejected']}, {found['num_lost']}, {found['num_unfinished']}",
    )
    return f"| {name} | {' | '.join(cells)} |"

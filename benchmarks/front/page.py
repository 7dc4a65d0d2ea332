"""The results page: a table, the goals beside it, and what its words mean."""

import os
import platform
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path

from benchmarks.front.rows import ROWS

# Of one HTTP process: tokens a second, what is added to each token at P99, and the slowest answer of /health
# at every rate up to that.
GOAL_TOKENS, GOAL_P99_MILLISECONDS, GOAL_HEALTH_MILLISECONDS = 20_000, 20.0, 50.0

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("P50 ms", "p50_milliseconds", ".1f"),
    ("P99 ms", "p99_milliseconds", ".1f"),
    ("spread P50 ms", "spread_p50_milliseconds", ".1f"),
    ("HTTP CPU, µs/token", "front_microseconds", ".1f"),
    ("engine CPU", "engine_microseconds", ".1f"),
    ("load CPU", "load_microseconds", ".1f"),
    ("/health P99 ms", "health_p99_milliseconds", ".1f"),
    ("worst ms", "health_worst_milliseconds", ".1f"),
)
_JUDGED = ("tokens_per_second", "p99_milliseconds", "health_worst_milliseconds")
_LEGEND = """\
*tokens/s*: delivered in the steady middle of the run, after its first second and before its last streams are
left to end. *P50, P99*: from the moment the engine's step had the token to the moment the client's thread had
read it, over all tokens of that middle; the client's own time to read 256 sockets one after the other is in
it, as the floor shows. *spread*: from the first to the last stream's receipt of one step's tokens. *CPU*:
processor time of all HTTP processes, of the engine process and of the client, in user and system mode, for
each token, with what beginning and ending the requests costs; unlike times it hardly depends on what else the
machine does. */health*: asked every 50 ms on a kept connection and on new ones in turn, from before the 256
requests are sent at once.
"""
# What is explained only where there are such rows.
_LEGEND_OF_ROWS = {
    "floor": "*floor*: the same bytes from a process that only sends what it has made before.\n",
    "as fast as it goes": (
        "*as fast as it goes*: the engine does not wait between steps, so P50 and P99 are time in buffers.\n"
    ),
    "at a time": "*(N/s)*: long prompts answered per second besides.\n",
}


def render(reports: dict[str, list[dict[str, float]]], conditions: str) -> str:
    """The results page: medians over rounds, and of what is a worst the worst of all."""
    lines = [
        "# What the HTTP side carries",
        "",
        "Written by `python -m benchmarks.front.run`: 256 streams, an engine that costs nothing; every",
        "number is a median over rounds, but for the worst, which is that of all rounds.",
        "",
        conditions,
        "",
        "| load | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "| --- |" + " ---: |" * len(_COLUMNS),
    ]
    for name, rounds in reports.items():
        cells = [
            format(_over_rounds(key, [report[key] for report in rounds]), form) if key in rounds[0] else ""
            for _, key, form in _COLUMNS
        ]
        prompts = statistics.median(report.get("long_prompts_per_second", 0.0) for report in rounds)
        shown = f"{name} ({prompts:.0f}/s)" if prompts else name
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    legend = [text for word, text in _LEGEND_OF_ROWS.items() if any(word in name for name in reports)]
    left_out = [row.name for row in ROWS if row.name not in reports]
    if left_out:
        legend.append(f"Rows left out of this run: {'; '.join(left_out)}.\n")
    return "\n".join([*lines, "", *verdicts(reports), "", _LEGEND + "".join(legend)])


def verdicts(reports: dict[str, list[dict[str, float]]]) -> list[str]:
    """The goals beside what one process did at each rate that it was asked for.

    Fewer tokens than asked for are no miss by themselves: between an answer's last token and the first of the
    next on its connection the engine takes a step without it. What says that the process falls behind is
    how late the tokens are.
    """
    lines, carried = [], 0.0
    for row in ROWS:
        if row.name not in reports or row.num_servers != 1 or not row.tokens_per_second:
            continue
        shown = {key: _over_rounds(key, [one[key] for one in reports[row.name]]) for key in _JUDGED}
        tokens, p99, health = shown.values()
        is_soon = p99 < GOAL_P99_MILLISECONDS
        carried = max(carried, tokens if is_soon else 0.0)
        said = f"{tokens:,.0f} tokens/s, {tokens / row.tokens_per_second:.1%} of the pace, "
        said += f"with {p99:.1f} ms at P99 (goal {GOAL_P99_MILLISECONDS:g}: {_met(is_soon)})"
        if row.tokens_per_second <= GOAL_TOKENS:
            is_quick = health < GOAL_HEALTH_MILLISECONDS
            said += f"; slowest /health {health:.1f} ms (goal {GOAL_HEALTH_MILLISECONDS:g}: {_met(is_quick)})"
        lines.append(f"- {row.name}: {said}")
    if lines:
        said = f"most tokens/s with less than {GOAL_P99_MILLISECONDS:g} ms at P99: {carried:,.0f}"
        lines.append(f"- One process: {said} (goal {GOAL_TOKENS:,}: {_met(carried >= GOAL_TOKENS)})")
    return lines


def _met(is_met: bool) -> str:  # noqa: FBT001
    return "met" if is_met else "missed"


def _over_rounds(key: str, values: list[float]) -> float:
    return max(values) if "worst" in key else statistics.median(values)


def describe_conditions(rounds: int, seconds: float, load_before: float) -> str:
    """What must be known to read the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    ).stdout.strip()
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if "model name" in line
    ]
    packages = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "uvloop", "pyzmq", "tokenizers"))
    machine = f"{os.cpu_count()} CPUs ({models[0] if models else platform.processor()})"
    is_real_time = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    urgency = "real-time class" if is_real_time else f"niceness {os.getpriority(os.PRIO_PROCESS, 0)}"
    parts = [
        f"Machine: {machine}, shared by engine, HTTP processes and load.",
        f"Load average: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after; {urgency}.",
        f"Python {platform.python_version()}, {packages}.",
        f"Commit {commit or 'unknown'}; {rounds} rounds of {seconds:g} s for each load.",
    ]
    return "\n".join(f"- {part}" for part in parts)

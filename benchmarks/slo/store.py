"""Results that are there already: one JSON line per finished task, under a fingerprint of all that shapes it.

The fingerprint is of the task, of the plan, of what is simulated (the arrivals, the promise and its bounds,
replicas and conditions) and of the code that decides the outcome, without its docstrings and imports: the
simulator, and what of the runtime and the operator it runs. How traces are read and services are specified is
none of it, only what comes of that. Headway's own results hang on the control law, too, and a fault's on its
values; baselines on their code, the oracle on its own; so that a change of the law simulates nothing else
again. Rows hold no time series, so that the file is small enough to be kept beside the code and a run that
began on one machine goes on another.
"""

import ast
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.slo import another_draw
from benchmarks.slo.loads import Halves
from benchmarks.slo.plan import Plan, Task, as_inputs
from benchmarks.slo.told import as_headway
from benchmarks.slo.work import excerpts

from headway_operator.slo import target_of
from headway_simulator.trace import Trace

ROOT = Path(__file__).parents[2]
SIMULATED = ("operator/headway_simulator", "operator/headway_operator/plan.py", "benchmarks/slo/work.py")
# What the simulated engine runs of the runtime.
ENGINE = (
    *("batch", "blocks", "commits", "config", "draft_policy", "guessing", "histograms", "metrics"),
    *(
        "overtaking",
        "prefix_cache",
        "prompt_cost",
        "promptness",
        "request",
        "scheduler",
        "sequence",
        "step_accounts",
        "step_draft",
        "step_loop",
    ),
    "step_moments",
)
GATEWAY = "runtime/headway_gateway/load.py"
LAW = ("operator/headway_operator/slo",)
TOLD = ("benchmarks/slo/told.py",)
DRAWN = ("benchmarks/slo/another_draw.py",)
BASELINES = ("operator/headway_simulator/baselines",)
ORACLE = tuple(
    f"operator/headway_simulator/{name}.py"
    for name in (
        *("oracle", "courses", "course_search", "descent", "least_work", "limit_candidates"),
        *("priced_courses", "schedules"),
        "table_processes",
    )
)
# What makes the excerpts, which are fingerprinted themselves; what shows results; what only the oracle reads.
NOT_OF_THE_PROOF = (
    *("errors.py", "flags.py", "generators.py", "options.py", "rates.py"),
    *("service_flags.py", "trace_files.py"),
    *("context_limit.py", "least_run.py", "levers.py", "plan_over_load.py", "plot.py", "report.py"),
    *("simulate_command.py", "timeline.py", "unsimulated.py"),
    *(Path(one).name for one in ORACLE),
)


class Fingerprints:
    """Of tasks, for one version of the code and one set of traces. root: where the code is."""

    def __init__(self, plan: Plan, files: Mapping[str, Path], root: Path = ROOT) -> None:
        self._plan = plan
        engine = (f"runtime/headway_runtime/{name}.py" for name in ENGINE)
        self._simulator = _code([*SIMULATED, *engine, GATEWAY], root)
        self._of_kind = {
            "headway": _code(LAW, root),
            "long": _code(LAW, root),
            "draw": _code([*LAW, *DRAWN], root),
            "told": _code([*LAW, *TOLD], root),
            "oracle": _code(ORACLE, root),
            "baseline": _code(BASELINES, root),
        }
        self._files = files
        self._parts: dict[tuple[str, str], Halves] = {}
        self._digests: dict[int, str] = {}
        self._met: dict[Task, list[str]] = {}

    def of(self, task: Task) -> str:
        """Equal for what would come out equal."""
        parts = {
            "task": [task.kind, task.load, task.name, task.promise],
            "plan": as_inputs(self._plan, task),
            "simulator": self._simulator,
            "controller": self._of_kind[task.kind],
            "excerpts": self._excerpts(task),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _excerpts(self, task: Task) -> list[str]:
        # All baselines meet the same.
        met = replace(task, name="") if task.kind == "baseline" else task
        if task.kind == "told":
            met = as_headway(task)
        if met not in self._met:
            self._met[met] = list(self._made(met))
        return self._met[met]

    def _made(self, task: Task) -> Iterator[str]:
        plan = self._plan.of_task(task)
        # What is neither over a longer time nor of another draw shares its parts.
        of = (task.load, task.kind if task.kind in ("long", "draw") else "")
        if task.kind == "draw":
            plan, task = another_draw.drawn(plan), another_draw.as_headway(task)
        if of not in self._parts:
            self._parts[of] = Halves(task.load, self._files, plan)
        for one in excerpts(plan, task, self._parts[of]):
            target = target_of(one.setting.service.spec)
            simulated = (target, one.setting.engine, one.setting.conditions, one.warm_up_seconds)
            yield f"{self._digest(one.trace)} {simulated!r}"

    def _digest(self, trace: Trace) -> str:
        # By identity: the parts of each load are kept, and comparing thousands of arrivals takes its time.
        found = self._digests.get(id(trace))
        if found is None:
            told = repr((trace.arrivals, trace.duration_seconds, trace.step_at_seconds))
            found = self._digests[id(trace)] = hashlib.sha256(told.encode()).hexdigest()
        return found


def _code(paths: Iterable[str], root: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for file in _python_files(root / path, root / BASELINES[0]):
            if root != ROOT and not file.is_file():
                continue  # another version of the code lacks it
            digest.update(str(file.relative_to(root)).encode())
            digest.update(acting(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def acting(source: str) -> str:
    """The lines that make a difference: without imports, docstrings and blank lines."""
    idle: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        first = node.body[:1] if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) else []
        for one in (node, *first):
            if isinstance(one, ast.Import | ast.ImportFrom) or one in first:
                idle.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return "\n".join(line for number, line in lines if number not in idle and line.strip())


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _python_files(path: Path, apart: Path) -> Iterator[Path]:
    """Of a folder, but for another one in it."""
    if not path.is_dir():
        yield path
        return
    for one in sorted(path.rglob("*.py")):
        if one.name not in NOT_OF_THE_PROOF and (path == apart or apart not in one.parents):
            yield one


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by fingerprint. A line that a killed run left half is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["fingerprint"]] = entry["rows"]
    return found


def prune(path: Path, fingerprints: Collection[str]) -> int:
    """Keep what stands under these fingerprints, of each the newest; how many other lines there were."""
    kept = {key: rows for key, rows in read(path).items() if key in fingerprints}
    num_lines = len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0
    whole = path.with_suffix(".whole")
    whole.write_text("", encoding="utf-8")
    for key, rows in kept.items():
        add(whole, key, rows)
    whole.replace(path)
    return num_lines - len(kept)


def add(path: Path, fingerprint: str, rows: list[dict[str, Any]]) -> None:
    """Append a task's rows, on the disk before anything else is begun."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"fingerprint": fingerprint, "rows": rows}) + "\n")
        file.flush()
        os.fsync(file.fileno())

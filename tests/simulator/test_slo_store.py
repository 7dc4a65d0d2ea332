"""What the benchmark's results are kept under, and which of them are forgotten."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.slo import loads, store
from benchmarks.slo.loads import LOADS
from benchmarks.slo.plan import FAULTS, Plan, Task, tasks
from benchmarks.slo.run import main
from tests.simulator.test_slo_benchmark import TINY

from headway_simulator.baselines import BASELINES


def test_a_change_of_the_law_is_a_change_of_headway_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.Fingerprints(TINY, {})
    monkeypatch.setattr(store, "LAW", ("operator/headway_operator/slo/decide.py",))
    after = store.Fingerprints(TINY, {})
    changed = {task for task in tasks(TINY) if before.of(task) != after.of(task)}
    assert changed == {task for task in tasks(TINY) if task.kind in ("headway", "told", "draw", "long")}
    other = store.Fingerprints(replace(TINY, seed=2), {})
    assert all(after.of(task) != other.of(task) for task in tasks(TINY))
    # More loads or controllers change nothing of those that there were.
    more = store.Fingerprints(replace(TINY, loads=("step", "flash"), baselines=tuple(BASELINES)), {})
    assert all(after.of(task) == more.of(task) for task in tasks(TINY))


def test_all_of_the_runtime_that_an_engine_is_simulated_with_is_fingerprinted() -> None:
    """But for what it never reaches: adapters, offload, models and their files."""
    code = "import sys, headway_simulator.engine; print(*(one for one in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    runtime = {one.removeprefix("headway_runtime.") for one in loaded.split() if "headway_runtime." in one}
    unreached = ("adapters", "draft_metrics", "errors", "model_config", "offload", "parallel", "sources")
    assert {one for one in runtime if not one.startswith((*unreached, "speculative_options"))} == set(
        store.ENGINE
    )


def test_a_change_of_what_headway_is_told_is_one_of_told_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.Fingerprints(TINY, {})
    monkeypatch.setattr(store, "TOLD", ())
    after = store.Fingerprints(TINY, {})
    assert {task.kind for task in tasks(TINY) if before.of(task) != after.of(task)} == {"told"}


def test_other_arrivals_or_another_promise_are_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = store.Fingerprints(TINY, {})
    before = {task: fingerprints.of(task) for task in tasks(TINY)}
    task = Task("headway", "step", promise=(3.0, 95))
    assert fingerprints.of(task) == before[task]
    assert fingerprints.of(replace(task, promise=(3.0, 99))) != before[task]
    made = LOADS["step"].make

    def without_the_last(files: Mapping[str, Path], plan: Plan) -> loads.Parts:
        parts = made(files, plan)
        verdict, settled = (
            replace(one, arrivals=one.arrivals[:-1]) for one in (parts.verdict, parts.settled)
        )
        return replace(parts, verdict=verdict, settled=settled)

    monkeypatch.setattr(loads, "LOADS", {"step": replace(LOADS["step"], make=without_the_last)})
    fewer = store.Fingerprints(TINY, {})
    # The arrivals that are tuned on are the same, but a baseline is judged on the others, too.
    assert all(fewer.of(task) != before[task] for task in tasks(TINY))


def test_a_fault_of_other_values_is_another_row() -> None:
    before = store.Fingerprints(TINY, {})
    stronger = store.Fingerprints(replace(TINY, faults=(replace(FAULTS[0], missing_samples=0.3),)), {})
    changed = {task for task in tasks(TINY) if before.of(task) != stronger.of(task)}
    assert {task.name for task in changed} == {FAULTS[0].name}


def test_a_change_of_the_oracle_is_a_change_of_the_oracle_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.Fingerprints(TINY, {})
    monkeypatch.setattr(store, "ORACLE", ("operator/headway_simulator/oracle.py",))
    after = store.Fingerprints(TINY, {})
    dearer = store.Fingerprints(replace(TINY, oracle_budget=9), {})
    for other in (after, dearer):
        changed = {task.kind for task in tasks(TINY) if before.of(task) != other.of(task)}
        assert changed == {"oracle"}


def test_what_a_module_says_of_itself_and_where_its_names_come_from_is_no_change_of_what_it_does() -> None:
    source = """\"\"\"Doc.\"\"\"

from a import (
    b,
)
import c


def f(x):
    \"\"\"Two
    lines.\"\"\"
    import d
    return "text"
"""
    assert store.acting(source) == 'def f(x):\n    return "text"'
    assert store.acting("x = 1\n\n\ny = 2  # why") == "x = 1\ny = 2  # why"


def test_pruning_forgets_what_is_not_of_todays_code_and_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, fingerprints = tmp_path / "results.jsonl", store.Fingerprints(TINY, {})
    wanted = [fingerprints.of(task) for task in tasks(TINY)]
    for number, fingerprint in enumerate(["other", *wanted, *wanted[:2], "another"]):
        store.add(lines, fingerprint, [{"number": number}])
    with lines.open("a", encoding="utf-8") as file:
        file.write("half a li")
    before = store.read(lines)
    monkeypatch.setattr("benchmarks.slo.run.Plan", lambda names: TINY)
    monkeypatch.setattr("benchmarks.slo.run.run", lambda *of_whom: None)
    assert main(["--prune", "--out", str(tmp_path)]) == 0
    assert store.read(lines) == {key: before[key] for key in wanted}
    assert before[wanted[0]] == [{"number": 1 + len(wanted)}]
    assert len(lines.read_text(encoding="utf-8").splitlines()) == len(wanted)
    # Two of other code, two that were found again, and half a line.
    assert "5 results of other code" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["results.jsonl"]

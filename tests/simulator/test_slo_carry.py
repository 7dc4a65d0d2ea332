"""Results carried over a change of the code: where samples come out the same, and not where one does not."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.slo import carry, store
from benchmarks.slo.plan import Task, tasks
from benchmarks.slo.run import main, run
from tests.simulator.test_slo_benchmark import TINY

TINIER = replace(TINY, verdict_seconds=20.0, tuning_seconds=20.0, oracle_budget=1, rate_scale=0.03)
ENGINE_FILE = "runtime/headway_runtime/prefix_cache.py"


@pytest.fixture
def revision(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version of the code in which a file of the engine was otherwise, as if checked out."""
    before = tmp_path_factory.mktemp("before")
    for name in ("operator", "runtime", "benchmarks/slo"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(store.ROOT / name, before / name, ignore=ignored)
    with (before / ENGINE_FILE).open("a", encoding="utf-8") as file:
        file.write("NEVER_USED = 1\n")

    def check_out(name: str, folder: Path) -> None:
        assert name == "v1"
        shutil.copytree(before, folder, dirs_exist_ok=True)

    monkeypatch.setattr(carry, "_check_out", check_out)
    return before


def known(lines: Path) -> set[str]:
    return set(store.read(lines))


def test_what_comes_out_the_same_is_not_simulated_again(
    tmp_path: Path, revision: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        # As that version would have done it.
        patch.setattr(store.Fingerprints.__init__, "__defaults__", (revision,))
        run(TINIER, {}, tmp_path, 1)
    lines, before = tmp_path / "results.jsonl", known(tmp_path / "results.jsonl")
    capsys.readouterr()
    run(TINIER, {}, tmp_path, 1, (), "v1")
    shown = capsys.readouterr().out
    # Headway, with its fault, the oracle, told, another draw, long, and both baselines.
    assert "8 tasks to see whether the code of v1 finds the same" in shown
    assert "8 tasks carried over" in shown
    assert "0 tasks to do, 8 done before" in shown
    after = known(lines)
    assert len(after) == 16
    assert after > before
    # And once more: there is nothing left to carry.
    run(TINIER, {}, tmp_path, 1, (), "v1")
    shown = capsys.readouterr().out
    assert "0 tasks to see" in shown
    assert "0 tasks carried over" in shown


def test_nothing_is_carried_over_where_a_sample_comes_out_otherwise(tmp_path: Path, revision: Path) -> None:
    lines = tmp_path / "results.jsonl"
    of_then = store.Fingerprints(TINY, {}, revision)
    row = {"processor_seconds": 1.0, "measures": {"joint_attainment": 0.99}}
    for task in tasks(TINY):
        store.add(lines, of_then.of(task), [row])

    def simulate(samples: list[Task]) -> Any:
        for task in samples:
            is_other = task.kind == "baseline" and task.name == "keda-waiting-1"
            measures = {"joint_attainment": 0.98 if is_other else 0.99}
            yield task, [{"processor_seconds": 2.0, "measures": measures}]

    with pytest.raises(carry.CarryError, match="keda-waiting-1"):
        carry.over(TINY, {}, lines, "v1", simulate)
    assert len(known(lines)) == len(tasks(TINY))


def test_what_has_been_found_otherwise_already_is_looked_at_as_well(tmp_path: Path, revision: Path) -> None:
    lines = tmp_path / "results.jsonl"
    of_then, today = store.Fingerprints(TINY, {}, revision), store.Fingerprints(TINY, {})
    row = {"processor_seconds": 1.0, "measures": {"joint_attainment": 0.99}}
    for task in tasks(TINY):
        store.add(lines, of_then.of(task), [row])
    fault = next(task for task in tasks(TINY) if task.kind == "headway" and task.name)
    store.add(lines, today.of(fault), [{**row, "measures": {"joint_attainment": 0.5}}])
    with pytest.raises(carry.CarryError, match="missing"):
        carry.over(TINY, {}, lines, "v1", lambda samples: [(task, [row]) for task in samples])


def test_no_revision_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--out", str(tmp_path), "--carry", "no-such-revision"]) == 2
    assert "--carry='no-such-revision' cannot be checked out" in capsys.readouterr().err
    assert main(["--quick", "--out", str(tmp_path), "--carry", "HEAD"]) == 2
    assert "has nothing of that revision's code" in capsys.readouterr().err
    assert main(["--quick", "--out", str(tmp_path), "--carry", "HEAD", "--report"]) == 2
    assert "leave --report and --only out" in capsys.readouterr().err


def test_a_revision_is_fingerprinted_by_its_own_code(tmp_path: Path) -> None:
    carry._check_out("HEAD", tmp_path)
    one = next(iter(tasks(TINY)))
    before = store.Fingerprints(TINY, {}, tmp_path).of(one)
    with (tmp_path / ENGINE_FILE).open("a", encoding="utf-8") as file:
        file.write("NEVER_USED = 1\n")
    assert store.Fingerprints(TINY, {}, tmp_path).of(one) != before
    # What it did not have yet is no reason to refuse it.
    (tmp_path / ENGINE_FILE).unlink()
    assert store.Fingerprints(TINY, {}, tmp_path).of(one) != before

"""The benchmark of the controller, on a load of a minute: all it does, once, and again after a stop."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.slo import page, store
from benchmarks.slo.fit import fit, least_squares
from benchmarks.slo.loads import LOADS
from benchmarks.slo.plan import FAULTS, Plan, Task, quick, tasks
from benchmarks.slo.run import main, run

from headway_operator.slo import Target
from headway_operator.state import Attainment, Decision, Observed, Sample
from headway_runtime.step_moments import StepMoments
from headway_simulator.baselines import BASELINES
from headway_simulator.cluster import Simulation
from headway_simulator.control import Controller
from headway_simulator.step_model import StepModel

TINY = Plan(
    ("step",),
    slo_factors=(3.0,),
    percentiles=(95,),
    baselines=("static-mean", "keda-waiting-1"),
    faults=FAULTS[:1],
    verdict_seconds=60.0,
    warm_up_seconds=20.0,
    tuning_seconds=30.0,
    tuning_warm_up_seconds=10.0,
    num_candidates=2,
    rate_scale=0.03,
)


def row(controller: str, attained: float, hours: float, **more: Any) -> dict[str, Any]:
    kind = controller if controller in ("headway", "oracle") else "baseline"
    measured = {
        "joint_attainment": attained,
        "gpu_hours": hours,
        "worst_five_minutes": None,
        "actions_per_hour": 1.0,
        "reversals_per_hour": 0.0,
        "recovery_seconds": None,
        "num_rejected": 0,
        "num_lost": 0,
        "num_unfinished": 0,
        "mean_replicas": 9.0,
    }
    return {
        "kind": kind,
        "load": "step",
        "slo_factor": 3.0,
        "percentile": 95,
        "fault": "",
        "controller": controller,
        "is_attained": True,
        "processor_seconds": 1.0,
        "parameters": {},
        "measures": {**measured, **more.pop("measures", {})},
        **more,
    }


def test_it_runs_writes_its_page_and_goes_on_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(TINY, {}, tmp_path, 1)
    assert "5 tasks, 0 of them done before" in capsys.readouterr().out
    report = json.loads((tmp_path / "results.json").read_text())
    controllers = [(one["controller"], one["fault"]) for one in report["rows"]]
    assert controllers == [
        *(("headway", ""), ("oracle", ""), ("static-mean", ""), ("keda-waiting-1", "")),
        ("headway", "20% of samples missing"),
    ]
    shown = (tmp_path / "results.md").read_text()
    assert "| **headway** |" in shown
    assert "Not part of this run: azure" in shown
    assert (tmp_path / "step.svg").stat().st_size > 5000
    # The last line was being written when the machine stopped.
    lines = tmp_path / "results.jsonl"
    lines.write_text(lines.read_text()[:-20])
    run(TINY, {}, tmp_path, 1)
    assert "5 tasks, 4 of them done before" in capsys.readouterr().out
    again = json.loads((tmp_path / "results.json").read_text())
    for one in (*report["rows"], *again["rows"]):
        del one["processor_seconds"]
    assert again["rows"] == report["rows"]


def test_a_change_of_the_law_is_a_change_of_headway_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.Fingerprints(TINY, {})
    monkeypatch.setattr(store, "LAW", ("operator/headway_operator/slo/decide.py",))
    after = store.Fingerprints(TINY, {})
    changed = {task for task in tasks(TINY) if before.of(task) != after.of(task)}
    assert changed == {task for task in tasks(TINY) if task.kind == "headway"}
    other = store.Fingerprints(replace(TINY, seed=2), {})
    assert all(after.of(task) != other.of(task) for task in tasks(TINY))
    # More loads or controllers change nothing of those that there were.
    more = store.Fingerprints(replace(TINY, loads=("step", "flash"), baselines=tuple(BASELINES)), {})
    assert all(after.of(task) == more.of(task) for task in tasks(TINY))


def test_a_full_plan_has_every_case_and_begins_with_what_ships() -> None:
    names = tuple(LOADS)
    found = tasks(Plan(names))
    assert len(found) == len(set(found))
    nominal = [one for one in found if one.kind == "headway" and not one.name]
    assert found[: len(nominal)] == nominal
    assert len(nominal) == 4 * len(names)
    assert sum(one.kind == "oracle" for one in found) == len(names)
    assert sum(one.kind == "baseline" for one in found) == len(names) * len(BASELINES)
    assert sum(bool(one.name) and one.kind == "headway" for one in found) == 4 * 2 * len(names)
    assert len(tasks(quick(names[:2]))) < 30
    assert Task("oracle", "step").words == "step oracle"


def test_goals_that_are_missed_are_named() -> None:
    rows = [
        row("headway", 0.94, 13.0, measures={"reversals_per_hour": 3.0}),
        row("headway", 0.90, 13.0, fault="20% of samples missing"),
        row("oracle", 0.95, 10.0),
        row("keda-waiting-1", 0.96, 12.0),
        row("static-mean", 0.93, 12.0),
    ]
    goals = page.goals_of(page.table_of(rows))
    assert [goal.missed for goal in goals] == [
        ["step, 3x, P95: 94.00%"],
        ["step, 3x, P95: 1.30 times"],
        ["step, 3x, P95: keda-waiting-1"],
        ["step, 3x, P95: 3.0"],
        ["step, 3x, P95, 20% of samples missing: 4.0 points lower"],
    ]
    good = [row("headway", 0.97, 11.0), row("oracle", 0.95, 10.0), row("keda-waiting-1", 0.96, 12.0)]
    assert not any(goal.missed for goal in page.goals_of(page.table_of(good)))


def test_a_step_model_is_found_again_in_what_an_engine_tells_of_its_steps(build: Any) -> None:
    seen: list[Sample] = []

    def decide(
        target: Target, memory: None, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, None]:
        seen.append(sample)
        unknown = Attainment(None, None, 0, 0, "unknown")
        return Decision(now, 1, target.initial, "Fixed", "", "", unknown, unknown, {}), None

    model = StepModel("m", 10.0, 0.1, 1.0, 64_000, decode_context_milliseconds=0.002)
    setting = build.setting(engine={"model": model, "overlaps": False})
    Simulation(build.load(seconds=120.0), setting, Controller("c", lambda sample, now: None, decide)).result()
    first, last = (sample.replicas["pod-1"] for sample in (seen[1], seen[-1]))
    assert first is not None
    assert last is not None
    found = fit("m", first, last, 3.0)
    assert found.relative_error < 1e-3
    assert found.num_steps > 100
    assert found.model.base_milliseconds == pytest.approx(10.0, rel=0.001)
    assert found.model.prefill_token_milliseconds == pytest.approx(0.1, rel=0.001)
    assert found.model.decode_milliseconds == pytest.approx(1.0, rel=0.01)
    assert found.model.decode_context_milliseconds == pytest.approx(0.002, rel=0.01)
    assert found.model.delivery_milliseconds == 3.0
    assert found.model.kv_cache_tokens == 64_000


def test_no_coefficient_of_a_fit_is_negative() -> None:
    """Steps of which those with more sequences were shorter."""
    moments = StepMoments()
    for prompt, decodes, milliseconds in ((100, 1, 30.0), (100, 8, 20.0), (200, 4, 40.0), (50, 2, 15.0)):
        moments.step(milliseconds, prompt, decodes, 100 * decodes)
    assert all(one >= 0 for one in least_squares(moments.snapshot().prompt_steps))


def test_a_trace_that_is_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--azure", "none.csv"]) == 2
    assert "--azure='none.csv' is no file" in capsys.readouterr().err

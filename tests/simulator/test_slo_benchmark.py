"""The benchmark of the controller, on a load of a minute: all it does, once, and again after a stop."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.slo import another_draw, course, goals, loads, page, told, work
from benchmarks.slo.loads import LOADS
from benchmarks.slo.pictures import front
from benchmarks.slo.plan import FAULTS, JUMPING, Plan, Task, quick, simulated_seconds, tasks
from benchmarks.slo.run import main, run

from headway_simulator.baselines import BASELINES
from headway_simulator.cluster import BEGIN_SECONDS, Setting
from headway_simulator.control import Controller
from headway_simulator.oracle import Oracle, find_oracle
from headway_simulator.step_model import StepModel
from headway_simulator.trace import Trace
from headway_simulator.work import mean_replicas

TINY = Plan(
    ("step",),
    promises=((3.0, 95),),
    baselines=("static-mean", "keda-waiting-1"),
    faults=FAULTS[:1],
    verdict_seconds=40.0,
    warm_up_seconds=10.0,
    tuning_seconds=30.0,
    tuning_warm_up_seconds=10.0,
    num_candidates=2,
    oracle_budget=2,
    num_long_promises=1,
    most_long_seconds=60.0,
    rate_scale=0.06,
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
        "ended_by_budget": True,
        "num_simulated": 4,
        "least_gpu_hours": 5.0,
        "processor_seconds": 1.0,
        "parameters": {},
        "measures": {**measured, **more.pop("measures", {})},
        **more,
    }


def test_it_runs_writes_its_page_and_goes_on_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(TINY, {}, tmp_path, 1)
    assert "8 tasks to do, 0 done before" in capsys.readouterr().out
    report = json.loads((tmp_path / "results.json").read_text())
    controllers = [(one["controller"], one["fault"]) for one in report["rows"]]
    assert controllers == [
        *(("headway", ""), ("oracle", ""), (told.CONTROLLER, "")),
        *(("headway", ""), ("headway", ""), ("headway", "20% of samples missing")),
        *(("static-mean", ""), ("keda-waiting-1", "")),
    ]
    shown = (tmp_path / "results.md").read_text()
    assert "| **headway** |" in shown
    assert "| step, 3x, P95 | 1 |" in shown
    assert "Not part of this run: azure" in shown
    assert (tmp_path / "step.svg").stat().st_size > 5000
    # The last line was being written when the machine stopped.
    lines = tmp_path / "results.jsonl"
    lines.write_text(lines.read_text()[:-20])
    run(TINY, {}, tmp_path, 1)
    assert "1 tasks to do, 7 done before" in capsys.readouterr().out
    again = json.loads((tmp_path / "results.json").read_text())
    for one in (*report["rows"], *again["rows"]):
        del one["processor_seconds"]
    assert again["rows"] == report["rows"]


def test_one_kind_of_tasks_can_be_done_before_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(TINY, {}, tmp_path, 1, ("baseline",))
    assert "2 tasks to do, 0 done before" in capsys.readouterr().out
    report = json.loads((tmp_path / "results.json").read_text())
    assert [one["controller"] for one in report["rows"]] == ["static-mean", "keda-waiting-1"]
    run(TINY, {}, tmp_path, 1, ())
    assert "0 tasks to do, 2 done before" in capsys.readouterr().out


def test_tighter_targets_are_met_on_half_of_the_requests() -> None:
    plan = Plan(("step",))
    loose, tight = (
        len(loads.Halves("step", {}, plan).of((factor, 95)).verdict.arrivals) for factor in (3.0, 1.5)
    )
    assert tight == pytest.approx(loose / 2, rel=0.05)


def test_a_full_plan_has_every_case_and_begins_with_what_ships() -> None:
    names = tuple(LOADS)
    plan = Plan(names)
    found = tasks(plan)
    assert len(found) == len(set(found))
    nominal = [one for one in found if one.kind == "headway" and not one.name]
    assert found[: len(nominal)] == nominal
    oracles = [one for one in found if one.kind == "oracle"]
    assert found[len(nominal) :][: len(oracles)] == oracles
    assert [(one.load, one.name) for one in oracles] == [
        (name, of) for name in names for of in ("3x", "1.5x")
    ]
    assert plan.of_task(oracles[1]).promises == ((1.5, 99), (1.5, 95))
    assert {one.promise for one in nominal} == {(3.0, 95), (3.0, 99), (1.5, 95), (1.5, 99)}
    assert sum(one.kind == "baseline" for one in found) == len(names) * len(BASELINES)
    assert sum(bool(one.name) and one.kind == "headway" for one in found) == len(FAULTS) * len(names)
    assert {one.step_time_error for one in FAULTS} == {0.5, 1.0, 2.0}
    assert {one.cold_start_seconds for one in FAULTS} == {10.0, 60.0, 180.0}
    assert len(tasks(quick(names[:2]))) < 30
    assert Task("oracle", "step", "3x").words == "step oracle 3x"


def test_our_own_step_times_are_a_load_once_they_are_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fast a replica or one half as fast: as many are busy."""
    assert "own-step" in loads.ALL_LOADS
    assert ("own-step" in LOADS) == loads.FITTED_FILE.is_file()
    rates = []
    for factor in (1.0, 2.0):
        model = StepModel("own", 20.0 * factor, 0.5 * factor, 1.0 * factor, 64_000)
        path = tmp_path / "fitted.json"
        path.write_text(json.dumps(asdict(model)))
        monkeypatch.setattr(loads, "FITTED_FILE", path)
        own = next(one for one in loads._MADE if one.name == "own-step")
        verdict = own.make({}, Plan(("own-step",)).of("own-step")).verdict
        assert mean_replicas(model, verdict) == pytest.approx(loads.OWN_REPLICAS, rel=0.1)
        rates.append(verdict.requests_per_second)
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.1)


def test_of_loads_that_jump_headway_is_told_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many are asked for at the first pass after the jump, and kept; fewer requests miss."""
    asked = [one for one in tasks(Plan(("azure", "step"))) if one.kind == "told"]
    assert [(one.load, one.promise) for one in asked] == [("step", one) for one in Plan(("step",)).promises]
    made = [one for one in LOADS.values() if not one.files]
    jumping = {one.name for one in made if one.make({}, TINY).verdict.step_at_seconds is not None}
    assert jumping == {one.name for one in made} & set(JUMPING)
    plan = replace(TINY, rate_scale=0.3, verdict_seconds=240.0, settling_seconds=30.0)
    task = next(one for one in tasks(plan) if one.kind == "told")
    runs = []

    class Kept(told.Simulation):  # type: ignore[name-defined, misc]
        def result(self) -> Any:
            runs.append(super().result())
            return runs[-1]

    monkeypatch.setattr(told, "Simulation", Kept)
    (found,) = told.done(plan, task, {})
    (untold,) = work.done(plan, told.as_headway(task), {})
    assert found["measures"]["joint_attainment"] > untold["measures"]["joint_attainment"]
    (excerpt,) = work.excerpts(plan, told.as_headway(task), loads.Halves("step", {}, plan))
    jump_at = BEGIN_SECONDS + (excerpt.trace.step_at_seconds or 0.0)
    before = [one.replicas for one in runs[0].passes if one.at < jump_at]
    after = [one.replicas for one in runs[0].passes if one.at >= jump_at]
    assert min(after) >= told.MANY * before[-1]


def test_another_draw_is_of_the_same_load_and_of_other_requests() -> None:
    task = next(one for one in tasks(TINY) if one.kind == "draw")
    (found,) = another_draw.done(TINY, task, {})
    (first,) = work.done(TINY, another_draw.as_headway(task), {})
    assert (found["kind"], found["controller"]) == ("draw", "headway")
    assert found["measures"]["num_arrivals"] == pytest.approx(first["measures"]["num_arrivals"], rel=0.3)
    drawn, known = (
        loads.Halves("step", {}, plan).of((3.0, 95)).verdict for plan in (another_draw.drawn(TINY), TINY)
    )
    assert drawn.step_at_seconds == known.step_at_seconds
    assert drawn.arrivals != known.arrivals


def test_a_longer_time_is_headways_alone_on_fewer_requests_and_whole() -> None:
    plan = Plan(("step", "diurnal"))
    found = [one for one in tasks(plan) if one.kind == "long"]
    assert {(one.load, one.promise) for one in found} == {
        (load, promise) for load in plan.loads for promise in plan.promises[:2]
    }
    for task, minutes in ((found[0], 30), (found[2], 60)):
        longer = plan.of_task(task)
        verdict = loads.Halves(task.load, {}, longer).of((3.0, 95)).verdict
        assert verdict.duration_seconds == plan.warm_up_seconds + 60.0 * minutes
        usual = loads.Halves(task.load, {}, plan).of((3.0, 95)).verdict
        assert verdict.requests_per_second < 0.6 * usual.requests_per_second
        assert simulated_seconds(plan, task) < 1200.0


def test_fixed_limits_are_what_tpot_allows_where_no_more_are_better() -> None:
    """A queue of its own is what scalers on waiting requests see."""
    task = Task("baseline", "step", "static-peak")
    promise = (1.5, 95)
    plan = replace(TINY, promises=(promise,), baseline_factors=(1.5,))
    tuning = work._tuning(plan, "step", loads.Halves("step", {}, plan), promise)
    limits = work._fixed_limits(tuning, promise, {})
    assert limits.max_num_seqs < tuning.setting.service.spec.highest_limits[0]
    (row_of_it,) = work.done(plan, task, {})
    assert row_of_it["parameters"]["limits"] == asdict(limits)


def test_the_oracle_is_judged_on_what_headway_is_judged_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both after the same warm-up, so with caches as warm."""
    met: list[tuple[float, float]] = []

    def watched(trace: Trace, setting: Setting, **more: Any) -> Oracle:
        met.append((trace.duration_seconds, more["judged_from_seconds"]))
        return find_oracle(trace, setting, **more)

    monkeypatch.setattr(work, "find_oracle", watched)
    oracle = work.done(TINY, Task("oracle", "step", "3x"), {})[0]["measures"]
    assert met == [(50.0, 10.0)]
    headway = work.done(TINY, Task("headway", "step", promise=(3.0, 95)), {})[0]["measures"]
    assert oracle["num_arrivals"] == headway["num_arrivals"]


def test_knative_looks_as_often_as_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[float]] = {}
    run_of = work._run

    def watched(excerpt: work.Excerpt, controller: Controller[Any]) -> Any:
        seen.setdefault(controller.name, set()).add(excerpt.setting.conditions.interval_seconds)
        return run_of(excerpt, controller)

    monkeypatch.setattr(work, "_run", watched)
    for name in ("knative-kpa", "keda-waiting-1"):
        work.done(TINY, Task("baseline", "step", name), {})
    assert seen["knative-kpa"] == {2.0}
    assert seen["keda-waiting-1"] == {5.0}


def test_goals_that_are_missed_are_named() -> None:
    rows = [
        row("headway", 0.94, 13.0, measures={"reversals_per_hour": 30.0}),
        row("headway", 0.94, 13.0, kind="long", measures={"reversals_per_hour": 3.0}),
        row("headway", 0.93, 13.0, kind="draw"),
        row("headway", 0.90, 13.0, fault="20% of samples missing"),
        row("headway", 0.935, 13.0, fault="cold start 10 s"),
        row("headway", 0.92, 13.0, fault="cold start 180 s"),
        row("oracle", 0.95, 10.0),
        row("keda-waiting-1", 0.96, 12.0),
        row("static-mean", 0.93, 12.0),
    ]
    found = goals.goals_of(goals.table_of(rows))
    assert [goal.missed for goal in found] == [
        ["step, 3x, P95: 94.00%"],
        ["step, 3x, P95: 93.00%"],
        ["step, 3x, P95: 1.30 times"],
        ["step, 3x, P95: 1.30 times"],
        [],
        ["step, 3x, P95: keda-waiting-1"],
        ["step, 3x, P95: keda-waiting-1 0.92 times"],
        ["step, 3x, P95: 3.0"],
        ["step, 3x, P95, 20% of samples missing: 4.0 points lower"],
        ["step, 3x, P95, cold start 180 s: 2.0 points lower"],
    ]
    assert [goal.verdict for goal in found] == ["missed"] * 4 + ["not measured"] + ["missed"] * 5
    assert [goal.count for goal in found[-2:]] == [1, 2]
    few = {"mean_replicas": 7.0}
    good = [
        row("headway", 0.97, 11.0),
        row("headway", 0.96, 12.0, kind="draw"),
        row("oracle", 0.95, 10.0, measures=few, ended_by_budget=False),
        row("keda-waiting-1", 0.96, 12.0),
    ]
    found = goals.goals_of(goals.table_of(good))
    assert [goal.count for goal in found[2:5]] == [1, 0, 1], "of all, of large ones, of finished ones"
    assert [goal.verdict for goal in found] == [
        *["met"] * 3,
        "not measured",
        *["met"] * 3,
        *["not measured"] * 3,
    ]


def test_a_baseline_that_attains_the_objective_for_less_is_named_though_headway_attains_more() -> None:
    rows = [row("headway", 0.99, 13.0), row("keda-waiting-1", 0.96, 12.0), row("static-mean", 0.94, 9.0)]
    front, dearer = goals.goals_of(goals.table_of(rows))[5:7]
    assert front.verdict == "met"
    assert dearer.missed == ["step, 3x, P95: keda-waiting-1 0.92 times"]


def tried(window: float, attained: float, hours: float) -> dict[str, Any]:
    """A candidate that a baseline was tuned with."""
    return {"parameters": {"window": window}, "joint_attainment": attained, "gpu_hours": hours}


def test_the_page_says_losses_bounds_few_replicas_and_what_is_not_finished(tmp_path: Path) -> None:
    rows = [
        row("headway", 0.94, 13.0),
        row("oracle", 0.95, 10.0, measures={"mean_replicas": 6.4}),
        row(
            "keda-waiting-1",
            0.96,
            12.0,
            parameters={"window": 300.0},
            tuning=[tried(300.0, 0.9, 3.0), tried(0.0, 0.9, 3.0)],
        ),
        row("static-mean", 0.93, 14.0, machine="2 cores of a kind", processor_seconds=1800.0),
        row("headway", 0.97, 6.0, kind="draw"),
        row("headway", 0.97, 6.0, kind="long", judged_seconds=1800.0),
        row(told.CONTROLLER, 0.945, 50.0, kind="told"),
    ]
    page.write(TINY, rows, tmp_path, [Task("baseline", "step", "static-peak")])
    shown = (tmp_path / "results.md").read_text()
    less = "1: step, 3x, P95 (0.92 times; Headway misses it)"
    assert f"| keda-waiting-1 | 0 | 1: step, 3x, P95 | 0 | {less} |" in shown
    assert "| static-mean | 1 | 0 | 0 | 0 |" in shown
    assert "| step, 3x, P95 | 30 | 9.0 | 97.00% | - | 6.00 | 1 | 0.0 |" in shown
    assert "| keda-waiting-1 (better than headway) | 96.00% | - | 12.00 | 1.20 | 2.40 |" in shown
    assert "| headway, told of the jump as it comes | 94.50% | - | - | - | - | 1 |" in shown
    assert "| 0 of 1 | step, 3x, P95: 94.00%, told 94.50% |" in shown
    assert "| keda-waiting-1 | 1 | 1 | 1 | 1 of window 300.0 |" in shown, "tuning could not tell"
    assert "| step, 3x, P95 | 94.00% | 97.00% | 13.00 | 6.00 |" in shown
    assert "baselines 0.50 h on 2 cores of a kind" in shown
    assert "Fewer than 8 replicas" in shown
    assert "0 of 1 have fewer than 8 replicas on average" in shown
    assert "ended by its budget" in shown
    assert "**Not finished: 1 tasks.** step baseline static-peak." in shown
    assert (
        "| at most 1.25 times the oracle's GPU-hours | missed | 0 of 1 | step, 3x, P95: 1.30 times |" in shown
    )
    assert "make bench-slo AZURE=FILE" in shown
    assert "dynamo-planner's documented interval, 180 s, ends at most once" in shown


def test_a_trace_that_is_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--azure", "none.csv"]) == 2
    assert "--azure='none.csv' is no file" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_jobs_that_are_no_number_are_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--jobs", jobs])
    assert f"{jobs!r} is no number of at least 1" in capsys.readouterr().err


def test_the_front_has_whom_none_beats_in_both() -> None:
    def row(gpu_hours: float, attained: float) -> dict[str, dict[str, float]]:
        return {"measures": {"gpu_hours": gpu_hours, "joint_attainment": attained}}

    beaten, dear_and_worse, same_cost = row(3.0, 0.9), row(6.0, 0.98), row(2.0, 0.5)
    rows = [row(5.0, 0.99), beaten, row(2.0, 0.95), dear_and_worse, same_cost]
    assert front(rows) == [(2.0, 95.0), (5.0, 99.0)]


def test_a_course_tells_each_ten_seconds_and_what_the_row_of_the_page_does() -> None:
    task = Task("headway", "step", promise=(3.0, 95))
    targets, heads, *lines, attained = course.course(TINY, task, {})
    (found,) = work.done(TINY, task, {})
    measured = found["measures"]
    assert (
        attained == f"attained {measured['joint_attainment']:.2%} for {measured['gpu_hours']:.2f} GPU-hours"
    )
    assert targets.endswith("P95")
    columns = heads.split()
    times, came, called = ([float(line.split()[k]) for line in lines] for k in (0, 1, columns.index("call")))
    assert [round(after - before) for before, after in pairwise(times)] == [10] * (len(times) - 1)
    assert times[0] == pytest.approx(-TINY.settling_seconds, abs=10)
    assert max(came) > 1.5 * min(came) > 0
    assert all(one >= 1 for one in called)

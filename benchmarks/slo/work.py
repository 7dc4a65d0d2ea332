"""Does one task of the plan: simulates, judges, and hands back its results as rows; writes nothing."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.slo.loads import LOADS, Halves
from benchmarks.slo.plan import Plan, Promise, Task

from headway_operator.samples import Limits
from headway_operator.slo import Target, target_of
from headway_runtime.config import Limits as EngineLimits
from headway_simulator.baselines import BASELINES, Baseline, Known
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.control import Controller, headway
from headway_simulator.flags import build_parser
from headway_simulator.measures import Measures, judged_from, measures
from headway_simulator.options import known_of, setting_of
from headway_simulator.oracle import INTERVAL_SECONDS, Ends, find_oracle
from headway_simulator.records import Run
from headway_simulator.step_model import read_step_model
from headway_simulator.trace import Trace, part_of
from headway_simulator.work import guessed_batch, guessed_replicas

# Budgets of tokens that are tried for the fixed limits of baselines.
NUM_BUDGETS = 4
Row = dict[str, Any]
# Fixed limits found for one baseline are those of all others that this process tunes on the same excerpt.
_found_limits: dict[tuple[Plan, str, Promise], Limits] = {}


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a load and its service. warm_up_seconds: at its beginning, that are not judged."""

    trace: Trace
    setting: Setting
    warm_up_seconds: float

    def judged(self, run: Run, target: Target) -> Measures:
        step_at = self.trace.step_at_seconds
        return measures(
            judged_from(run, self.warm_up_seconds),
            target,
            self.setting.engine.model.gpus,
            None if step_at is None or step_at < self.warm_up_seconds else step_at - self.warm_up_seconds,
        )


def done(plan: Plan, task: Task, files: Mapping[str, Path]) -> list[Row]:
    """The results of a task, one for each promise."""
    plan = plan.of_task(task)
    parts = Halves(task.load, files, plan)
    if task.kind in ("headway", "long"):
        assert task.promise is not None
        return [_headway(plan, task, parts, task.promise)]
    if task.kind == "oracle":
        return list(_oracles(plan, task, parts))
    assert task.kind == "baseline", task.kind
    return list(_baseline(plan, task, parts))


def excerpts(plan: Plan, task: Task, parts: Halves) -> Iterator[Excerpt]:
    """What a task simulates: with the code that does it, all that its results hang on. plan: of the load."""
    if task.kind in ("headway", "long"):
        assert task.promise is not None
        yield _met_by_headway(plan, task, parts, task.promise)
        return
    for promise in plan.promises if task.kind == "oracle" else plan.baseline_promises:
        if task.kind == "oracle":
            yield _verdict(plan, task.load, parts, promise)
            continue
        yield _settled(plan, task.load, parts, promise)
        yield _tuning(plan, task.load, parts, promise)


def _met_by_headway(plan: Plan, task: Task, parts: Halves, promise: Promise) -> Excerpt:
    """The verdict's excerpt, with the task's fault if it has one."""
    excerpt = _settled(plan, task.load, parts, promise)
    for fault in plan.faults:
        if fault.name == task.name:
            changed = replace(excerpt.setting, conditions=fault.on(excerpt.setting.conditions))
            excerpt = replace(excerpt, setting=changed)
    return excerpt


def _headway(plan: Plan, task: Task, parts: Halves, promise: Promise) -> Row:
    excerpt = _met_by_headway(plan, task, parts, promise)
    began = time.process_time()
    found = _judged(excerpt, headway())
    judged = excerpt.trace.duration_seconds - excerpt.warm_up_seconds
    return row_of(task, promise, found, began, controller="headway", fault=task.name, judged_seconds=judged)


def _oracles(plan: Plan, task: Task, parts: Halves) -> Iterator[Row]:
    """One for each promise; what becomes of a minute's arrivals on n replicas is simulated once for all that
    differ in nothing but the percentile."""
    known: dict[float, Ends] = {}
    for promise in plan.promises:
        began = time.process_time()
        excerpt = _verdict(plan, task.load, parts, promise)
        found = find_oracle(
            excerpt.trace,
            excerpt.setting,
            ends=known.setdefault(promise[0], {}),
            budget=plan.oracle_budget,
            judged_from_seconds=excerpt.warm_up_seconds,
        )
        gpus = excerpt.setting.engine.model.gpus
        more = {
            "is_attained": found.is_attained,
            "ended_by_budget": found.ended_by_budget,
            "num_simulated": found.num_simulated,
            "least_gpu_hours": found.least_replica_hours * gpus,
            "parameters": {"limits": asdict(found.limits)},
        }
        yield row_of(task, promise, found.measures, began, controller="oracle", **more)


def _baseline(plan: Plan, task: Task, parts: Halves) -> Iterator[Row]:
    """Tuned on the first half, judged on the second; a run is judged by all promises on the same requests."""
    baseline = BASELINES[task.name]
    candidates = baseline.candidates[: plan.num_candidates]
    tuned: dict[object, Run] = {}
    judged: dict[object, Run] = {}
    for promise in plan.baseline_promises:
        began = time.process_time()
        tuning = _tuning(plan, task.load, parts, promise)
        trial = replace(tuning, trace=part_of(tuning.trace, 0.0, plan.limits_seconds))
        key = (plan, task.load, promise)
        if key not in _found_limits:
            _found_limits[key] = _fixed_limits(trial, promise, tuned)
        limits = _found_limits[key]
        known = replace(known_of(tuning.trace, tuning.setting), limits=limits)
        results = [_tried(tuning, known, baseline, one, promise, tuned) for one in candidates]
        best = _best(results, promise)
        verdict = _settled(plan, task.load, parts, promise)
        found = _tried(verdict, known, baseline, candidates[best], promise, judged)
        yield row_of(
            task,
            promise,
            found,
            began,
            controller=task.name,
            parameters={**asdict(candidates[best]), "limits": asdict(limits)},
            tuning=[
                {
                    "parameters": asdict(one),
                    "joint_attainment": result.joint_attainment,
                    "gpu_hours": result.gpu_hours,
                }
                for one, result in zip(candidates, results, strict=True)
            ],
        )


def _best(results: list[Measures], promise: Promise) -> int:
    """Of those that attain the objective the cheapest; where none does, the one that comes nearest."""

    def rank(index: int) -> tuple[bool, float, float]:
        found = results[index]
        is_attained = found.joint_attainment * 100 >= promise[1]
        return not is_attained, 0.0 if is_attained else -found.joint_attainment, found.gpu_hours

    return min(range(len(results)), key=rank)


def _tried(
    excerpt: Excerpt,
    known: Known,
    baseline: Baseline,
    candidate: Any,
    promise: Promise,
    runs: dict[object, Run],
) -> Measures:
    key = (candidate, known.limits, promise[0])
    if key not in runs:
        setting, interval = excerpt.setting, baseline.interval_seconds
        if interval is not None:
            setting = replace(setting, conditions=replace(setting.conditions, interval_seconds=interval))
        runs[key] = _run(replace(excerpt, setting=setting), baseline.make(known, candidate))
    return excerpt.judged(runs[key], target_of(excerpt.setting.service.spec))


def _fixed_limits(tuning: Excerpt, promise: Promise, runs: dict[object, Run]) -> Limits:
    """Batch limits for controllers that move none: first of some numbers of sequences, then of some token
    budgets those with which most requests of the tuning half meet the targets, on the replicas that its
    busiest minute needs. Of equals the fewest sequences, with which requests wait where others can see it."""
    target = target_of(tuning.setting.service.spec)
    highest, baseline = target.highest, BASELINES["static-peak"]
    most = highest.max_num_seqs

    def attained(limits: Limits) -> float:
        known = replace(known_of(tuning.trace, tuning.setting), limits=limits)
        key = ("limits", limits, promise[0])
        if key not in runs:
            runs[key] = _run(tuning, baseline.make(known, baseline.candidates[0]))
        return tuning.judged(runs[key], target).joint_attainment

    seqs = sorted({guessed_batch(tuning.setting.engine.model, target), most // 2, most})
    best = max((target.bound_limits(replace(highest, max_num_seqs=one)) for one in seqs), key=attained)
    tokens = (highest.max_num_batched_tokens >> halvings for halvings in range(NUM_BUDGETS))
    return max(
        (target.bound_limits(replace(best, max_num_batched_tokens=one)) for one in tokens), key=attained
    )


def _run(excerpt: Excerpt, controller: Controller[Any]) -> Run:
    return Simulation(excerpt.trace, excerpt.setting, controller).result()


def _judged(excerpt: Excerpt, controller: Controller[Any]) -> Measures:
    return excerpt.judged(_run(excerpt, controller), target_of(excerpt.setting.service.spec))


def _tuning(plan: Plan, load: str, parts: Halves, promise: Promise) -> Excerpt:
    return _excerpt(
        plan, load, parts.of(promise).whole, parts.of(promise).tuning, plan.tuning_warm_up_seconds, promise
    )


def _verdict(plan: Plan, load: str, parts: Halves, promise: Promise) -> Excerpt:
    return _excerpt(
        plan, load, parts.of(promise).whole, parts.of(promise).verdict, plan.warm_up_seconds, promise
    )


def _settled(plan: Plan, load: str, parts: Halves, promise: Promise) -> Excerpt:
    """The same for a controller, which is no newcomer when it is judged: it begins earlier."""
    found = parts.of(promise)
    warm_up = found.settling_seconds + plan.warm_up_seconds
    return _excerpt(plan, load, found.whole, found.settled, warm_up, promise)


def _excerpt(
    plan: Plan, load: str, whole: Trace, part: Trace, warm_up_seconds: float, promise: Promise
) -> Excerpt:
    """Targets are made of the whole load, so that both halves have the same."""
    factor, percentile = promise
    common = (
        *("--generate", "poisson", "--step-model", LOADS[load].step_model, "--slo-factor", str(factor)),
        *("--percentile", str(percentile), "--seed", str(plan.seed), "--initial-replicas", "1"),
    )
    made = setting_of(build_parser().parse_args(list(common)), whole)
    model = read_step_model(LOADS[load].step_model)
    first = part_of(part, 0.0, min(INTERVAL_SECONDS, part.duration_seconds))
    initial = guessed_replicas(model, first, target_of(made.service.spec))
    conditions = replace(made.conditions, initial_replicas=initial)
    longest = 1 + max(one.prompt_tokens + one.output_tokens for one in part.arrivals)
    engine = replace(
        made.engine,
        max_model_len=max(made.engine.max_model_len, longest),
        limits=EngineLimits(*made.service.spec.initial_limits),
    )
    return Excerpt(part, replace(made, conditions=conditions, engine=engine), warm_up_seconds)


def row_of(task: Task, promise: Promise, found: Measures, began: float, **more: Any) -> Row:
    """A result as it is stored. began: when the processor time that it took began."""
    return {
        "kind": task.kind,
        "load": task.load,
        "slo_factor": promise[0],
        "percentile": promise[1],
        "fault": "",
        "parameters": {},
        **more,
        "measures": asdict(found),
        "processor_seconds": round(time.process_time() - began, 2),
    }

"""Headway on a load that jumps, told of the jump as it comes: what of the misses is the start of replicas.

A controller learns of a jump from what it counts, some passes later, and whatever it asks for then is ready a
cold start after that. So each run with a jump is made once more with a Headway that asks at the first pass
after it for MANY times the replicas that it has, and goes on by its own law a minute after they are ready.
What still misses then, no controller could have helped that kept no more replicas before. What it costs says
nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.slo.loads import Halves
from benchmarks.slo.plan import Plan, Task
from benchmarks.slo.work import Row, excerpts

from headway_operator.samples import Sample
from headway_operator.slo import Memory, Target, target_of
from headway_operator.state import Decision, Observed
from headway_simulator.cluster import BEGIN_SECONDS, Conditions, Simulation
from headway_simulator.control import Controller, headway
from headway_simulator.schedules import ahead_seconds

MANY = 4
CONTROLLER = "headway, told of the jump as it comes"
# They are kept for so long after they are ready.
KEPT_SECONDS = 60.0


def done(plan: Plan, task: Task, files: Mapping[str, Path]) -> list[Row]:
    """The result of a task of kind `told`."""
    assert task.promise is not None
    began, plan = time.process_time(), plan.of_task(task)
    (excerpt,) = excerpts(plan, as_headway(task), Halves(task.load, files, plan))
    jump_at = excerpt.trace.step_at_seconds
    assert jump_at is not None, f"{task.load} has no jump"
    controller = told(jump_at, excerpt.setting.conditions)
    run = Simulation(excerpt.trace, excerpt.setting, controller).result()
    found = excerpt.judged(run, target_of(excerpt.setting.service.spec))
    return [
        {
            "kind": task.kind,
            "load": task.load,
            "slo_factor": task.promise[0],
            "percentile": task.promise[1],
            "fault": "",
            "parameters": {"many": MANY, "kept_seconds": KEPT_SECONDS},
            "controller": CONTROLLER,
            "measures": asdict(found),
            "processor_seconds": round(time.process_time() - began, 2),
        }
    ]


def as_headway(task: Task) -> Task:
    """The task that meets the same excerpt untold."""
    return replace(task, kind="headway")


def told(jump_at: float, conditions: Conditions) -> Controller[Memory]:
    """Headway, which is told of a jump so many seconds after the beginning. For one run."""
    shipped, begin = headway(), BEGIN_SECONDS + jump_at
    end = begin + ahead_seconds(conditions) + KEPT_SECONDS
    asked: list[int] = []

    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        decision, after = shipped.decide(target, memory, sample, observed, now)
        if not begin <= now < end:
            return decision, after
        if not asked:
            asked.append(MANY * max(1, decision.replicas))
        replicas = target.bound_replicas(max(decision.replicas, *asked))
        return replace(decision, replicas=replicas), replace(after, replicas=replicas)

    return Controller(CONTROLLER, shipped.begin, decide)

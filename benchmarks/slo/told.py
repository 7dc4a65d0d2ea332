"""Headway on a load that jumps, told of the jump as it comes: what of the misses is the start of replicas.

A controller learns of a jump from what it counts, some passes later, and whatever it asks for then is ready a
cold start after that. So each run with a jump is made once more with a Headway that asks at the first pass
after it for MANY times the replicas that it wants then, and keeps them to the end. What still misses is no
fault of how soon replicas were asked for, or of how many; what it costs says nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.slo.loads import Halves
from benchmarks.slo.plan import Plan, Task
from benchmarks.slo.work import Row, excerpts, row_of

from headway_operator.samples import Sample
from headway_operator.slo import Memory, Target, target_of
from headway_operator.state import Decision, Observed
from headway_simulator.cluster import BEGIN_SECONDS, Simulation
from headway_simulator.control import Controller, headway

MANY = 4
CONTROLLER = "headway, told of the jump as it comes"


def done(plan: Plan, task: Task, files: Mapping[str, Path]) -> list[Row]:
    """The result of a task of kind `told`."""
    assert task.promise is not None
    began, plan = time.process_time(), plan.of_task(task)
    (excerpt,) = excerpts(plan, as_headway(task), Halves(task.load, files, plan))
    jump_at = excerpt.trace.step_at_seconds
    assert jump_at is not None, f"{task.load} has no jump"
    run = Simulation(excerpt.trace, excerpt.setting, told_headway(jump_at)).result()
    found = excerpt.judged(run, target_of(excerpt.setting.service.spec))
    return [row_of(task, task.promise, found, began, controller=CONTROLLER, parameters={"many": MANY})]


def as_headway(task: Task) -> Task:
    """The task that meets the same excerpt untold."""
    return replace(task, kind="headway")


def told_headway(jump_at: float) -> Controller[Memory]:
    """Headway, which is told of a jump so many seconds after the beginning. For one run."""
    shipped = headway()
    asked: list[int] = []

    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        decision, after = shipped.decide(target, memory, sample, observed, now)
        if now < BEGIN_SECONDS + jump_at:
            return decision, after
        if not asked:
            asked.append(MANY * max(1, decision.replicas))
        replicas = target.bound_replicas(max(decision.replicas, *asked))
        return replace(decision, replicas=replicas), after._replace(replicas=replicas)

    return Controller(CONTROLLER, shipped.begin, decide)

"""What `make bench-slo` runs: loads, targets, objectives, controllers and faults, and how long of each.

A full run judges 20 minutes of the second half of each load (after five minutes before them, which warm
everything up and are not judged), tunes on ten minutes of the first half (two of them warm up), and asks the
oracle for the judged minutes.
"""

from dataclasses import asdict, dataclass, replace

from headway_simulator.baselines import BASELINES, MOST_CANDIDATES
from headway_simulator.cluster import Conditions


@dataclass(frozen=True, slots=True)
class Fault:
    """A condition that Headway meets once more."""

    name: str
    changes: tuple[tuple[str, float], ...]

    def on(self, conditions: Conditions) -> Conditions:
        return replace(conditions, **dict(self.changes))


FAULTS = (
    Fault("20% of samples missing", (("missing_samples", 0.2),)),
    Fault("steps told 2x as long", (("step_time_error", 2.0),)),
    Fault("cold start 10 s", (("cold_start_seconds", 10.0),)),
    Fault("cold start 180 s", (("cold_start_seconds", 180.0),)),
)
# Of these no more than a point of attainment may be lost.
JUDGED_FAULTS = tuple(fault.name for fault in FAULTS[:2])


@dataclass(frozen=True, slots=True)
class Plan:
    """Which part of everything, and how long. num_candidates: of each baseline, the default first."""

    loads: tuple[str, ...]
    slo_factors: tuple[float, ...] = (3.0, 1.5)
    percentiles: tuple[int, ...] = (95, 99)
    baselines: tuple[str, ...] = tuple(BASELINES)
    faults: tuple[Fault, ...] = FAULTS
    verdict_seconds: float = 1200.0
    warm_up_seconds: float = 300.0
    tuning_seconds: float = 600.0
    tuning_warm_up_seconds: float = 120.0
    num_candidates: int = MOST_CANDIDATES
    rate_scale: float = 1.0
    seed: int = 1

    @property
    def promises(self) -> tuple[tuple[float, int], ...]:
        """Targets and objectives, the most usual first."""
        return tuple((factor, percent) for factor in self.slo_factors for percent in self.percentiles)


def quick(loads: tuple[str, ...]) -> Plan:
    """Some five minutes: one promise, few candidates, short excerpts."""
    return Plan(
        loads,
        slo_factors=(3.0,),
        percentiles=(95,),
        faults=FAULTS[:2],
        verdict_seconds=240.0,
        warm_up_seconds=120.0,
        tuning_seconds=180.0,
        tuning_warm_up_seconds=60.0,
        num_candidates=3,
    )


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work; it makes a result for each promise, or for `promises` where it names some.

    kind: headway (with a fault or without), oracle, or baseline (its tuning, too).
    """

    kind: str
    load: str
    name: str = ""
    promise: tuple[float, int] | None = None

    @property
    def words(self) -> str:
        promise = "" if self.promise is None else f"{self.promise[0]:g}x P{self.promise[1]}"
        return " ".join(part for part in (self.load, self.kind, self.name, promise) if part)


def tasks(plan: Plan) -> list[Task]:
    """In the order of what they tell: a run that is cut short has whole tables of what came first."""
    found = [Task("headway", load, promise=promise) for promise in plan.promises for load in plan.loads]
    found += [Task("oracle", load) for load in plan.loads]
    found += [Task("baseline", load, name) for load in plan.loads for name in plan.baselines]
    found += [
        Task("headway", load, fault.name, promise)
        for fault in plan.faults
        for promise in plan.promises
        for load in plan.loads
    ]
    return found


def simulated_seconds(plan: Plan, task: Task) -> float:
    """About how long a load a task simulates, all its runs together."""
    whole = plan.warm_up_seconds + plan.verdict_seconds
    if task.kind == "headway":
        return whole
    if task.kind == "oracle":
        # Limits are tried on the three busiest minutes, then each minute on some numbers of replicas, with a
        # minute before and one after; then eight schedules for each promise.
        return 3 * 60 * (4 * 3 * 4 + plan.verdict_seconds / 60 * 8) + 8 * plan.verdict_seconds * len(
            plan.promises
        )
    factors = len(plan.slo_factors) if BASELINES[task.name].reads_targets else 1
    candidates = min(plan.num_candidates, len(BASELINES[task.name].candidates))
    return (4 + candidates * factors) * plan.tuning_seconds + 2 * factors * whole


def as_inputs(plan: Plan, task: Task) -> dict[str, object]:
    """What of the plan a task's results hang on: what else is asked for changes nothing of them."""
    whole = asdict(plan)
    for name in ("loads", "faults", "baselines"):
        del whole[name]
    if task.kind != "oracle":
        return whole
    for name in ("num_candidates", "tuning_seconds", "tuning_warm_up_seconds", "warm_up_seconds"):
        del whole[name]
    return whole

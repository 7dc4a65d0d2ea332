"""What `make bench-slo` runs: loads, targets, objectives, controllers and faults, and how long of each.

A full run judges ten minutes of the second half of each load (after two minutes before them, which warm
everything up and are not judged), tunes on four minutes of the first half (one of them warms up), and asks
the oracle for the judged minutes: what 90 minutes of two cores are enough for. With --long excerpts are twice
as long, ten minutes for tuning, and each baseline has all of its candidates.
"""

from dataclasses import asdict, dataclass, replace

from headway_simulator.baselines import BASELINES, MOST_CANDIDATES
from headway_simulator.cluster import Conditions


@dataclass(frozen=True, slots=True)
class Fault:
    """A condition that Headway meets once more."""

    name: str
    missing_samples: float = 0.0
    step_time_error: float = 1.0
    cold_start_seconds: float = 60.0

    def on(self, conditions: Conditions) -> Conditions:
        return replace(
            conditions,
            missing_samples=self.missing_samples,
            step_time_error=self.step_time_error,
            cold_start_seconds=self.cold_start_seconds,
        )


FAULTS = (
    Fault("20% of samples missing", missing_samples=0.2),
    Fault("steps told 2x as long", step_time_error=2.0),
    Fault("cold start 10 s", cold_start_seconds=10.0),
    Fault("cold start 180 s", cold_start_seconds=180.0),
)
# Of these no more than a point of attainment may be lost.
JUDGED_FAULTS = tuple(fault.name for fault in FAULTS[:2])


@dataclass(frozen=True, slots=True)
class Plan:
    """Which part of everything, and how long. num_candidates: of each baseline, the default first.

    num_faulty_promises: with how many of the promises faults are met. limits_seconds: of the tuning excerpt,
    for the choice of fixed batch limits. num_prices: of the oracle's search.
    """

    loads: tuple[str, ...]
    slo_factors: tuple[float, ...] = (3.0, 1.5)
    percentiles: tuple[int, ...] = (95, 99)
    baselines: tuple[str, ...] = tuple(BASELINES)
    faults: tuple[Fault, ...] = FAULTS
    num_faulty_promises: int = 2
    verdict_seconds: float = 600.0
    warm_up_seconds: float = 120.0
    tuning_seconds: float = 240.0
    tuning_warm_up_seconds: float = 60.0
    limits_seconds: float = 120.0
    num_candidates: int = 4
    num_prices: int = 4
    rate_scale: float = 1.0
    seed: int = 1

    @property
    def promises(self) -> tuple[tuple[float, int], ...]:
        """Targets and objectives, the most usual first."""
        return tuple((factor, percent) for factor in self.slo_factors for percent in self.percentiles)


def long(loads: tuple[str, ...]) -> Plan:
    """Twice as long as a full run, with all candidates and faults under every promise."""
    return Plan(
        loads,
        num_faulty_promises=4,
        verdict_seconds=1200.0,
        warm_up_seconds=300.0,
        tuning_seconds=600.0,
        tuning_warm_up_seconds=120.0,
        num_candidates=MOST_CANDIDATES,
        num_prices=8,
    )


def quick(loads: tuple[str, ...]) -> Plan:
    """Some five minutes: one promise, few candidates, short excerpts, a quarter of the requests."""
    return Plan(
        loads,
        slo_factors=(3.0,),
        percentiles=(95,),
        faults=FAULTS[:2],
        verdict_seconds=240.0,
        warm_up_seconds=120.0,
        tuning_seconds=180.0,
        tuning_warm_up_seconds=60.0,
        limits_seconds=90.0,
        num_candidates=2,
        rate_scale=0.25,
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
        for promise in plan.promises[: plan.num_faulty_promises]
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
        tried = 4 * 3 * 3 + plan.verdict_seconds / 60 * 7
        return 130 * tried + plan.num_prices * plan.verdict_seconds * len(plan.promises)
    factors = len(plan.slo_factors) if BASELINES[task.name].reads_targets else 1
    candidates = min(plan.num_candidates, len(BASELINES[task.name].candidates))
    tuning = candidates * factors * plan.tuning_seconds + 4 * plan.limits_seconds
    return tuning + 2 * factors * whole


def as_inputs(plan: Plan, task: Task) -> dict[str, object]:
    """What of the plan a task's results hang on: what else is asked for changes nothing of them."""
    whole = asdict(plan)
    unused = ["loads", "faults", "baselines", "num_faulty_promises"]
    if task.kind != "baseline":
        unused += ["num_candidates", "tuning_warm_up_seconds", "limits_seconds"]
    if task.kind == "headway":
        unused += ["slo_factors", "percentiles"]
    if task.kind != "oracle":
        unused += ["num_prices"]
    return {name: value for name, value in whole.items() if name not in unused}

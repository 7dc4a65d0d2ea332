"""What `make bench-slo` runs: loads, targets, objectives, controllers and faults, and how long of each.

A full run judges six minutes of the second half of each load, ten where requests are few or replicas cheap
to simulate (after two minutes before them, which warm everything up and are not judged, and for controllers
three more before these, in which they settle), tunes on an excerpt of the first half (one minute of it warms
up), and asks the oracle for the judged time. What jumps Headway meets once more, told of it (`told`), and
each load in another draw (`another_draw`). 90 minutes of two cores are not enough for all that could be
asked, so CUTS, `loads.LONG_ONLY` and the plan's own fields say what is left out, and the page says it again.
"""

from collections.abc import Mapping
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
    Fault("steps told half as long", step_time_error=0.5),
    Fault("cold start 10 s", cold_start_seconds=10.0),
    Fault("cold start 180 s", cold_start_seconds=180.0),
)
# A cold start of 60 s is what every other run has. To each of these no more than a point of attainment may be
# lost; what the controller is told, and how soon a replica serves, are judged apart.
TOLD_FAULTS, START_FAULTS = (tuple(one.name for one in some) for some in (FAULTS[:3], FAULTS[3:]))


# Targets as multiples of the idle latencies, and the objective.
Promise = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """At most so much of a load. num_promises: the first of the plan's."""

    verdict_seconds: float
    tuning_seconds: float
    num_promises: int = 4


# Targets below this multiple need some three times as many replicas; so many of the requests are enough for
# eight of them, and are simulated in as much less time.
TIGHT_FACTOR, TIGHT_RATE = 2.0, 0.5
# A simulated second of those takes so much of the time of one of the others.
TIGHT_COST = 0.6


# Fixed limits of baselines that are tried: of sequences three numbers, of token budgets three more; they are
# found once in each process for all baselines of a load.
NUM_LIMITS, LIMITS_SHARE = 6, 0.25


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of a load over a longer time: so many seconds, of so large a share of the requests."""

    seconds: float
    rate: float


# The whole second half of a recorded trace, but no more than half an hour of it; of a wave an hour.
STRETCHES: Mapping[str, Stretch] = {
    "azure": Stretch(1800.0, 0.5),
    "mooncake": Stretch(1800.0, 1.0),
    "servegen": Stretch(1800.0, 0.5),
    "flash": Stretch(1800.0, 0.5),
    "own-step": Stretch(1800.0, 0.5),
    "own-wave": Stretch(3600.0, 0.5),
    "step": Stretch(1800.0, 0.5),
    "diurnal": Stretch(3600.0, 0.25),
}

# Loads that jump: Headway meets them once more, told of the jump as it comes.
JUMPING = ("step", "flash", "own-step")

# A simulated second of tens of replicas takes much of a processor's second where requests are many, so less
# of that is judged. Mooncake's requests are few and long, our own engine's replicas slow: each costs little.
CUTS: Mapping[str, Cut] = {
    "azure": Cut(360.0, 180.0),
    "mooncake": Cut(600.0, 240.0),
    "servegen": Cut(360.0, 180.0),
    "flash": Cut(360.0, 180.0),
    "own-step": Cut(600.0, 180.0),
    "own-wave": Cut(600.0, 180.0),
    "step": Cut(360.0, 180.0),
    "diurnal": Cut(600.0, 180.0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Which part of everything, and how long, before CUTS.

    promises: the most telling first. baseline_factors: of the promises' factors those that baselines meet,
    too. num_candidates: of each baseline, the default first. num_faulty_promises: with how many of the
    promises faults are met. limits_seconds: of the tuning excerpt, for the choice of fixed batch limits.
    oracle_budget: courses that the oracle may simulate. num_long_promises: with how many of the promises
    Headway is judged over a longer time, too. most_long_seconds: of that.
    """

    loads: tuple[str, ...]
    promises: tuple[Promise, ...] = ((3.0, 95), (1.5, 99), (3.0, 99), (1.5, 95))
    baseline_factors: tuple[float, ...] = (3.0, 1.5)
    baselines: tuple[str, ...] = tuple(BASELINES)
    faults: tuple[Fault, ...] = FAULTS
    num_faulty_promises: int = 1
    verdict_seconds: float = 1800.0
    warm_up_seconds: float = 120.0
    settling_seconds: float = 180.0
    tuning_seconds: float = 600.0
    tuning_warm_up_seconds: float = 60.0
    limits_seconds: float = 90.0
    num_candidates: int = 3
    oracle_budget: int = 7
    num_long_promises: int = 2
    most_long_seconds: float = 3600.0
    is_cut: bool = True
    rate_scale: float = 1.0
    seed: int = 1

    def of(self, load: str) -> "Plan":
        """What is left of it for a load."""
        cut = CUTS.get(load)
        if cut is None or not self.is_cut:
            return self
        return replace(
            self,
            promises=self.promises[: cut.num_promises],
            verdict_seconds=min(self.verdict_seconds, cut.verdict_seconds),
            tuning_seconds=min(self.tuning_seconds, cut.tuning_seconds),
        )

    def met(self, load: str, promise: Promise) -> "Plan":
        """What is left of it for a load under a promise."""
        rate = TIGHT_RATE if promise[0] < TIGHT_FACTOR else 1.0
        return replace(self.of(load), rate_scale=self.rate_scale * rate)

    def longer(self, load: str) -> "Plan":
        """Of a load over a longer time."""
        stretch = STRETCHES[load]
        seconds = min(stretch.seconds, self.most_long_seconds)
        rate = self.rate_scale * stretch.rate
        return replace(self, verdict_seconds=seconds, rate_scale=rate, is_cut=False)

    def of_task(self, task: "Task") -> "Plan":
        """What is left of it for a task."""
        if task.kind == "long":
            return self.longer(task.load)
        left = self.of(task.load)
        if task.kind == "oracle":
            promises = tuple(one for one in left.promises if _times(one[0]) == task.name)
            return replace(left, promises=promises)
        return left

    @property
    def baseline_promises(self) -> tuple[Promise, ...]:
        return tuple(one for one in self.promises if one[0] in self.baseline_factors)


def long(loads: tuple[str, ...]) -> Plan:
    """An hour of each load as far as it goes, all candidates, promises and faults for all: a day of two
    cores."""
    return Plan(
        loads,
        num_faulty_promises=4,
        verdict_seconds=3600.0,
        warm_up_seconds=300.0,
        settling_seconds=600.0,
        tuning_warm_up_seconds=120.0,
        num_candidates=MOST_CANDIDATES,
        oracle_budget=40,
        is_cut=False,
    )


def quick(loads: tuple[str, ...]) -> Plan:
    """Some five minutes: one promise, few candidates, short excerpts, a quarter of the requests."""
    return Plan(
        loads,
        promises=((3.0, 95),),
        faults=FAULTS[:2],
        verdict_seconds=240.0,
        warm_up_seconds=120.0,
        settling_seconds=60.0,
        tuning_seconds=180.0,
        tuning_warm_up_seconds=60.0,
        limits_seconds=90.0,
        num_candidates=2,
        num_long_promises=0,
        rate_scale=0.25,
    )


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work; it makes a result for each promise, or for `promises` where it names some.

    kind: headway (with a fault or without), told (of a jump as it comes), draw (Headway on another draw of
    the load), long (Headway over a longer time), oracle, or baseline (its tuning, too). name: of the fault,
    or of the baseline; of an oracle the multiple that its targets are, as promises that differ in the
    percentile alone share most of what is simulated.
    """

    kind: str
    load: str
    name: str = ""
    promise: Promise | None = None

    @property
    def words(self) -> str:
        promise = "" if self.promise is None else f"{self.promise[0]:g}x P{self.promise[1]}"
        return " ".join(part for part in (self.load, self.kind, self.name, promise) if part)


def tasks(plan: Plan) -> list[Task]:
    """In the order of what they tell: a run that is cut short has whole tables of what came first."""
    found = [Task("headway", load, promise=one) for load in plan.loads for one in plan.of(load).promises]
    found += [Task("oracle", load, name) for load in plan.loads for name in _multiples(plan.of(load))]
    found += [
        Task("told", load, promise=one)
        for load in plan.loads
        if load in JUMPING
        for one in plan.of(load).promises
    ]
    found += [Task("draw", load, promise=one) for load in plan.loads for one in plan.of(load).promises]
    found += [
        Task("long", load, promise=promise)
        for load in plan.loads
        for promise in plan.of(load).promises[: plan.num_long_promises]
    ]
    found += [
        Task("headway", load, fault.name, promise)
        for fault in plan.faults
        for load in plan.loads
        for promise in plan.of(load).promises[: plan.num_faulty_promises]
    ]
    found += [Task("baseline", load, name) for name in plan.baselines for load in plan.loads]
    return found


def simulated_seconds(plan: Plan, task: Task) -> float:
    """About how long a load a task simulates, all its runs together, in seconds of the looser targets at the
    nominal rate."""
    rate_scale, plan = plan.rate_scale, plan.of_task(task)
    whole = plan.warm_up_seconds + plan.verdict_seconds
    if task.kind != "oracle":
        whole += plan.settling_seconds
    if task.promise is not None:
        return whole * _cost(task.promise[0]) * plan.rate_scale / rate_scale
    factors = {factor for factor, _ in plan.promises}
    if task.kind == "oracle":
        # Limits are tried on the busiest minute, then each minute on some numbers of replicas, with half
        # a minute before and as much after; then whole courses for each promise.
        tried = 120 * (4 * 2 + 3 + plan.verdict_seconds / 60 * 4)
        courses = plan.oracle_budget * whole
        return tried * sum(map(_cost, factors)) + courses * sum(_cost(one) for one, _ in plan.promises)
    candidates = min(plan.num_candidates, len(BASELINES[task.name].candidates))
    limits = NUM_LIMITS * LIMITS_SHARE * plan.limits_seconds
    runs = candidates * plan.tuning_seconds + limits + whole
    return runs * sum(map(_cost, factors & set(plan.baseline_factors)))


def _multiples(plan: Plan) -> list[str]:
    return list(dict.fromkeys(_times(factor) for factor, _ in plan.promises))


def _times(factor: float) -> str:
    return f"{factor:g}x"


def _cost(factor: float) -> float:
    return TIGHT_COST if factor < TIGHT_FACTOR else 1.0


def as_inputs(plan: Plan, task: Task) -> dict[str, object]:
    """What of the plan a task's results hang on: what else is asked for changes nothing of them."""
    whole = asdict(plan.of_task(task))
    unused = ["loads", "faults", "baselines", "num_faulty_promises", "is_cut"]
    unused += ["num_long_promises", "most_long_seconds"]
    if task.kind != "baseline":
        unused += ["num_candidates", "tuning_seconds", "tuning_warm_up_seconds", "limits_seconds"]
        unused += ["baseline_factors"]
    if task.kind in ("headway", "told", "draw", "long"):
        unused += ["promises"]
    # What the oracle knows needs no time to settle.
    unused += ["settling_seconds"] if task.kind == "oracle" else ["oracle_budget"]
    found = {name: value for name, value in whole.items() if name not in unused}
    found["tight_rate"] = [TIGHT_FACTOR, TIGHT_RATE]
    found["fault"] = [asdict(one) for one in plan.faults if task.kind == "headway" and one.name == task.name]
    return found

"""What a service would have cost had everything been known: the clairvoyant oracle.

Definition. A schedule says how many replicas serve in each INTERVAL_SECONDS, constant within. It is paid like
any other: replicas asked for ahead, by their cold start, cost GPU time meanwhile, and those let go while they
drain. The oracle is the cheapest schedule found whose run, in the same simulator, with the same gateway,
engine and cold starts and without faults, attains the objective: at least `percentile` of all arrivals meet
both targets. So its cost is one that can really be had; the true least cost is no higher.

Algorithm.
1. Batch limits, by the busiest interval: the most sequences with each budget of `limit_candidates`;
   kept are those with which fewest replicas do, of equals those with fewest misses. Then fewer
   sequences (a half, a quarter, as many as TPOT seems to allow, two, one), kept where still fewer replicas
   do: they have requests wait, which one interval alone shows too little of.
2. misses[i][n]: simulate the arrivals of interval i, after WARM_UP_SECONDS of those before it, on n replicas
   that know the targets, until they have ended, and count those that miss. Numbers are tried from what its
   work needs, upward until none misses, downward until most do. Beyond these, n misses nothing, or all.
3. `priced_courses` has the cheapest course whose misses are by step 2 no more than a share of those that the
   objective leaves.
4. That course is simulated whole, or until more have missed than may. If it attains the objective, a larger
   share is tried, else a smaller one; where none is small enough, replicas are added throughout.
5. `descent` takes replicas from the cheapest that attains it, for as long as what is left attains it, too.

Steps 4 and 5 have a budget of whole simulations; which course comes next depends on nothing but what came
before, so that a larger budget goes through the same courses first, and never ends with a dearer one.
`ended_by_budget` says whether it would have gone on; where not, no interval can do with one replica fewer.
Beside its cost stands one that nobody can go below: `least_work`.

A load may begin with a part that only warms caches up: it is served with what the first interval judged has,
or what its own work needs if that is more, and neither judged nor paid.

What is left out, and makes the result an upper bound: courses that are no shortest path for any price and not
below one in every interval, queues carried from one interval into the next in step 2 (4 and 5 have them), and
limits that change.
"""

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from headway_operator.samples import Limits
from headway_operator.slo import Target, target_of
from headway_runtime.config import Limits as EngineLimits
from headway_runtime.config import Targets as EngineTargets
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.course_search import Answers, CourseSearch, runs_ahead
from headway_simulator.courses import Table
from headway_simulator.descent import FAILED, Course, Ground, Tried
from headway_simulator.least_work import least_replica_seconds
from headway_simulator.limit_candidates import token_candidates
from headway_simulator.measures import Measures, judged_from, measures
from headway_simulator.priced_courses import PricedCourses
from headway_simulator.records import Allowance, Flight
from headway_simulator.schedules import INTERVAL_SECONDS, WarmUp, ahead_seconds, schedule
from headway_simulator.table_processes import beside, tables_of
from headway_simulator.trace import Trace, part_of
from headway_simulator.work import guessed_batch, guessed_replicas, simulated_seconds, work_seconds

__all__ = ["INTERVAL_SECONDS", "Ends", "Oracle", "budget_for", "find_oracle", "limits_beside"]

WARM_UP_SECONDS = 30.0
# After an interval its last arrivals are still served beside new ones.
COOL_DOWN_SECONDS = 60.0
# Of sequences: the most, a half and a quarter of them.
NUM_SEQUENCE_CANDIDATES = 3
# And so few that prompts do not stop each other, with whole prompts in a step.
FEWEST_SEQUENCES = (2, 1)
# Whole simulations of steps 4 and 5: as many as take so many seconds of processor time, within these bounds.
BUDGET, LEAST_BUDGET = 12, 5
BUDGET_SECONDS = 240.0
# So many more replicas that help nobody end the upward search.
VAIN_REPLICAS = 2
# Numbers with fewer misses than this share of those allowed need no larger one beside them.
ENOUGH_SHARE = 0.25
# Above this share of an interval's arrivals that miss, still fewer replicas are not tried.
HOPELESS_SHARE = 0.15
# Of how many may miss.
ROUNDING = 1e-6

Told = Callable[[float], None]
# How many of an interval's arrivals missed, by limits, interval and number of replicas.
Ends = dict[tuple[Limits, int, int], int]


@dataclass(frozen=True, slots=True)
class Oracle:
    """replicas: per interval judged. measures: of its run. is_attained: whether any course reached the
    objective; if none did, this is the one with the highest attainment. num_simulated: courses.
    ended_by_budget: whether more courses were left to try. least_replica_hours: what no schedule that attains
    the objective goes below."""

    replicas: tuple[int, ...]
    limits: Limits
    measures: Measures
    is_attained: bool
    num_simulated: int
    ended_by_budget: bool
    least_replica_hours: float


def find_oracle(
    trace: Trace,
    setting: Setting,
    told: Told = lambda share: None,
    ends: Ends | None = None,
    budget: int | None = None,
    judged_from_seconds: float = 0.0,
    num_processes: int = 1,
    limits: Callable[[], Limits] | None = None,
) -> Oracle:
    """The oracle of a load; `told` hears how far the search has come, from 0 to 1.

    ends: what searches of the same load and setting, but for the percentile, have found already; added to.
    budget: whole simulations, at least 1; with more it may be found to cost a little less, and never more.
    None: `budget_for` the load. Where nothing attains the objective those given up are run once more, whole.
    judged_from_seconds: what is before only warms caches up. num_processes: for steps 2, 4 and 5; with more
    than one, `ends` does not learn of step 2. limits: waits for step 1, where somebody else does that
    (`limits_beside`).
    """
    budget = budget_for(trace) if budget is None else budget
    assert budget >= 1, f"budget={budget!r} is below 1"
    assert judged_from_seconds < trace.duration_seconds, f"nothing is left after {judged_from_seconds!r} s"
    search = _search_of(trace, setting, {} if ends is None else ends, judged_from_seconds)
    with _collector_leaves_what_is_here():
        search.limits = search.choose_limits() if limits is None else limits()
        tables = []
        for table in tables_of(search, num_processes):
            tables.append(table)
            told(0.5 * len(tables) / search.num_intervals)
        return search.cheapest(tables, budget, num_processes, lambda share: told(0.5 + 0.5 * share))


def limits_beside(
    trace: Trace, setting: Setting, judged_from_seconds: float = 0.0
) -> AbstractContextManager[Callable[[], Limits]]:
    """Step 1 in a process of its own, beside what is done until `find_oracle` of the same asks for it."""
    return beside(_search_of(trace, setting, {}, judged_from_seconds), _Search.choose_limits)


def budget_for(trace: Trace) -> int:
    """Whole simulations that take some minutes: fewer of a larger load. It is guessed from the load alone, so
    that the same one has the same oracle everywhere."""
    return max(LEAST_BUDGET, min(BUDGET, int(BUDGET_SECONDS / max(1.0, simulated_seconds(trace)))))


def _search_of(trace: Trace, setting: Setting, ends: Ends, begin: float) -> "_Search":
    setting = _free(_without_faults(setting))
    return _Search(trace, setting, target_of(setting.service.spec), ends, begin)


def _without_faults(setting: Setting) -> Setting:
    conditions = replace(
        setting.conditions, missing_samples=0.0, deaths_per_pod_hour=0.0, cold_start_spread=0.0
    )
    return replace(setting, conditions=conditions)


def _free(setting: Setting) -> Setting:
    """A fixed number of replicas is a choice that the oracle has, too, and need not make."""
    service = setting.service
    spec, fixed = service.spec, service.spec.replicas
    if fixed is None:
        return setting
    most = max(spec.scaling.max_replicas, fixed)
    scaling = spec.scaling.model_copy(update={"max_replicas": most})
    free = spec.model_copy(update={"replicas": None, "scaling": scaling})
    return replace(setting, service=replace(service, spec=free))


class _Search:
    """The state of one search. tables: per interval, misses by number of replicas."""

    def __init__(self, trace: Trace, setting: Setting, target: Target, ends: Ends, begin: float) -> None:
        self._ends = ends
        self._trace = trace
        # Nobody reads what replicas would tell.
        self._setting = replace(setting, engine=replace(setting.engine, is_sampled=False))
        self._target = target
        self._times = [one.at_seconds for one in trace.arrivals]
        self._begin = begin
        self.num_intervals = max(1, math.ceil((trace.duration_seconds - begin) / INTERVAL_SECONDS))
        self._num_judged = len(trace.arrivals) - bisect_left(self._times, begin)
        self._allowed = self._num_judged * (1 - target.percentile / 100)
        self.limits = target.highest

    def choose_limits(self) -> Limits:
        """Step 1."""
        model = self._setting.engine.model
        busiest = max(range(self.num_intervals), key=lambda i: work_seconds(model, self._part(i)))
        highest, bounded = self._target.highest, self._target.bound_limits
        chosen, best = highest, (self._most() + 1, 0)
        for index, tokens in enumerate(token_candidates(model, self._target)):
            self.limits = self._target.with_token_budget(tokens)
            found = self._fewest(busiest, best[0] if index else None)
            if found < best:
                chosen, best = self.limits, found
        fewer = {highest.max_num_seqs >> halvings for halvings in range(1, NUM_SEQUENCE_CANDIDATES)}
        fewer.add(guessed_batch(model, self._target))
        tried = [replace(chosen, max_num_seqs=seqs) for seqs in sorted(fewer, reverse=True)]
        tried += [replace(highest, max_num_seqs=seqs) for seqs in FEWEST_SEQUENCES]
        for limits in map(bounded, tried):
            self.limits = limits
            is_other = self.limits.max_num_seqs < chosen.max_num_seqs
            if best[0] > self._target.min_replicas and is_other:
                found = self._fewest(busiest, best[0] - 1)
                if found[1] <= self._may_miss(busiest):
                    chosen, best = self.limits, found
        return chosen

    def misses(self, index: int) -> dict[int, int]:
        """Step 2: misses by number of replicas, from the last hopeless one to the first with next to none."""
        count = len(self._part(index).arrivals)
        if count == 0:
            return {self._target.min_replicas: 0}
        lowest, highest = self._target.min_replicas, self._most()
        enough = ENOUGH_SHARE * self._may_miss(index)
        number = first = self._guess(index)
        table = {first: self._missed(index, first)}
        while table[number] > enough and number < highest and not _is_in_vain(table, number):
            number += 1
            table[number] = self._missed(index, number)
        number = first
        while number > lowest and table[number] < count * HOPELESS_SHARE:
            number -= 1
            table[number] = self._missed(index, number)
        return table

    def cheapest(self, tables: Sequence[Table], budget: int, num_processes: int, told: Told) -> Oracle:
        """Steps 3 to 5."""
        counts = [len(self._part(index).arrivals) for index in range(self.num_intervals)]
        lowest, conditions = self._target.min_replicas, self._setting.conditions
        cold = conditions.cold_start_seconds
        courses = PricedCourses(tables, counts, lowest, self._most(), cold, self._allowed)
        ground = Ground(tables, counts, lowest, ahead_seconds(conditions))
        search = CourseSearch(courses, ground, budget)
        # None: given up, as more had missed than may.
        seen: dict[Course, Measures | None] = {}
        answers: Answers = {}
        with runs_ahead(self, num_processes) as run:

            def judge(course: Course) -> Tried:
                known = seen[course] = run(course, search.likely(course, answers))
                told(len(seen) / budget)
                if known is None or not self._attains(known):
                    return FAILED
                spare = self._allowed - round(self._num_judged * (1 - known.joint_attainment))
                return Tried(known.replica_hours, max(0.0, spare))

            is_done = search.goes_through(answers, judge)
        if attained := self._attaining(seen):
            best = min(attained, key=lambda one: attained[one].replica_hours)
            measured = attained[best]
        else:
            # Which of them attains most is known once they have been run whole, beyond the budget.
            whole = {one: known or self._simulated(one) for one, known in seen.items()}
            best = max(whole, key=lambda one: whole[one].joint_attainment)
            measured = whole[best]
        told(1.0)
        return Oracle(
            best,
            self.limits,
            measured,
            is_attained=bool(attained),
            num_simulated=len(seen),
            ended_by_budget=not is_done,
            least_replica_hours=least_replica_seconds(self._trace, self._setting, self._target, self._begin)
            / 3600,
        )

    def run(self, course: Course) -> Measures | None:
        """A course, run until more have missed than may; None if they have."""
        allowance = self._allowance()
        found = self._simulated(course, allowance)
        return None if allowance.is_spent else found

    def _simulated(self, course: Course, allowance: Allowance | None = None) -> Measures:
        """A course, run whole, or until the allowance is spent."""
        before = self._warm_up()
        initial = max(course[0], before.replicas)
        conditions = replace(self._setting.conditions, initial_replicas=initial)
        setting = replace(self._setting, conditions=conditions)
        controller = schedule(course, self.limits, conditions, before)
        _let_go()
        run = Simulation(self._trace, self._limited(setting), controller).result(allowance=allowance)
        step_at = self._trace.step_at_seconds
        jump = None if step_at is None or step_at < self._begin else step_at - self._begin
        return measures(judged_from(run, self._begin), self._target, setting.engine.model.gpus, jump)

    def _allowance(self) -> Allowance:
        """What may miss in a run that attains the objective."""
        first, targets = len(self._trace.arrivals) - self._num_judged, self._target.targets
        most_missed = math.floor(self._allowed + ROUNDING)
        return Allowance(first, targets.ttft_milliseconds, targets.tpot_milliseconds, most_missed)

    def _attaining(self, seen: Mapping[Course, Measures | None]) -> dict[Course, Measures]:
        return {course: found for course, found in seen.items() if found is not None and self._attains(found)}

    def _attains(self, found: Measures) -> bool:
        return found.joint_attainment * 100 >= self._target.percentile

    def _warm_up(self) -> WarmUp:
        """Served with what its work needs."""
        if self._begin == 0:
            return WarmUp()
        part = part_of(self._trace, 0.0, self._begin)
        needed = guessed_replicas(self._setting.engine.model, part, self._target)
        return WarmUp(self._begin, min(self._most(), needed))

    def _limited(self, setting: Setting) -> Setting:
        """Replicas that begin with the limits chosen."""
        limits = EngineLimits(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        return replace(setting, engine=replace(setting.engine, limits=limits))

    def _fewest(self, index: int, most: int | None) -> tuple[int, int]:
        """The least number that attains the objective in an interval, and its misses; of no number above
        `most`, which is then the first to be tried."""
        allowed = self._may_miss(index)
        number = self._guess(index) if most is None else most
        most = self._most() if most is None else most
        table = {number: self._missed(index, number)}
        while table[number] > allowed and number < most and not _is_in_vain(table, number):
            number += 1
            table[number] = self._missed(index, number)
        while table[number] <= allowed and number > self._target.min_replicas:
            table[number - 1] = self._missed(index, number - 1)
            if table[number - 1] > allowed:
                break
            number -= 1
        return number, table[number]

    def _may_miss(self, index: int) -> float:
        return len(self._part(index).arrivals) * (1 - self._target.percentile / 100)

    def _missed(self, index: int, number: int) -> int:
        """Of an interval's arrivals, those that miss on so many replicas."""
        key = (self.limits, index, number)
        if key not in self._ends:
            targets, served = self._target.targets, self._served(index, number)
            self._ends[key] = sum(
                not one.meets(targets.ttft_milliseconds, targets.tpot_milliseconds) for one in served
            )
        return self._ends[key]

    def _served(self, index: int, number: int) -> list[Flight]:
        """What becomes of an interval's arrivals on so many replicas."""
        start = self._begin + index * INTERVAL_SECONDS
        begin = max(0.0, start - WARM_UP_SECONDS)
        part = part_of(self._trace, begin, start + INTERVAL_SECONDS + COOL_DOWN_SECONDS)
        setting, targets = self._limited(self._setting), self._target.targets
        told = EngineTargets(targets.ttft_milliseconds, targets.tpot_milliseconds)
        setting = replace(
            setting,
            engine=replace(setting.engine, targets=told),
            conditions=replace(setting.conditions, initial_replicas=number),
        )
        first = bisect_left(self._times, start) - bisect_left(self._times, begin)
        last = first + len(self._part(index).arrivals)
        _let_go()
        return Simulation(part, setting, None).result(stops_after=range(first, last)).flights[first:last]

    def _part(self, index: int) -> Trace:
        start = self._begin + index * INTERVAL_SECONDS
        end = min(start + INTERVAL_SECONDS, self._trace.duration_seconds)
        first, last = bisect_left(self._times, start), bisect_left(self._times, end)
        return Trace("", self._trace.arrivals[first:last], end - start)

    def _guess(self, index: int) -> int:
        guess = guessed_replicas(self._setting.engine.model, self._part(index), self._target)
        return max(self._target.min_replicas, min(self._most(), guess))

    def _most(self) -> int:
        return min(self._target.max_replicas, self._setting.conditions.most_pods)


@contextmanager
def _collector_leaves_what_is_here() -> Iterator[None]:
    """A load's arrivals are many, and stay; `_let_go` would look through them each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _let_go() -> None:
    """Of the simulation before: its parts refer to each other, and are few and large, so that Python's
    collector, which goes by their number, would keep gigabytes of them."""
    gc.collect()


def _is_in_vain(table: dict[int, int], number: int) -> bool:
    """Whether the last replicas added have helped nobody: what misses now misses with any number."""
    return table[number] >= table.get(number - VAIN_REPLICAS, math.inf)

"""What a service would have cost had everything been known: the clairvoyant oracle.

Definition. A schedule says how many replicas serve in each INTERVAL_SECONDS, constant within. It is paid like
any other: replicas asked for ahead, by their cold start, cost GPU time meanwhile, and those let go while they
drain. The oracle is the cheapest schedule found whose run, in the same simulator, with the same gateway,
engine and cold starts and without faults, attains the objective: at least `percentile` of all arrivals meet
both targets. So its cost is one that can really be had; the true least cost is no higher.

Algorithm.
1. Batch limits: the candidate pairs (the most sequences; the most tokens of a step, halved some times) are
   tried on the busiest intervals. Kept is the pair with which fewest replicas do, of equals the one with
   fewest misses.
2. misses[i][n]: simulate the arrivals of interval i, after WARM_UP_SECONDS of those before it, on n replicas,
   until they have ended, and count those that miss. Numbers are tried from what its work needs, upward until
   none misses, downward until most do. Beyond these, n misses nothing, or everything.
3. For a price of a miss, `courses` has the cheapest course: of replica time, cold starts and priced misses.
4. A higher price means fewer misses and more cost. The price is bisected; each course is simulated whole, and
   the cheapest that attains the objective is kept.

What is left out, and makes the result an upper bound: courses that are no shortest path for any price, queues
carried from one interval into the next in step 2 (step 4 has them), and limits that change.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headway_operator.slo import Target, target_of
from headway_operator.state import Attainment, Decision, Limits, Observed, Sample
from headway_runtime.config import Limits as EngineLimits
from headway_simulator.cluster import BEGIN_SECONDS, Setting, Simulation
from headway_simulator.control import Controller
from headway_simulator.courses import Costs, cheapest_course
from headway_simulator.measures import Measures, measures
from headway_simulator.records import Flight
from headway_simulator.trace import Trace, part_of
from headway_simulator.work import guessed_replicas, work_seconds

INTERVAL_SECONDS = 60.0
WARM_UP_SECONDS = 60.0
# After an interval its last arrivals are still served beside new ones.
COOL_DOWN_SECONDS = 60.0
NUM_TOKEN_CANDIDATES = 4
NUM_BUSIEST = 3
NUM_PRICES = 8
# Bounds of the price of a miss, in replica-seconds.
LEAST_PRICE, MOST_PRICE = 0.01, 10_000.0
# So many more replicas that help nobody end the upward search.
VAIN_REPLICAS = 2
# Where no price attains the objective, up to so many replicas more are had all the time.
MOST_MARGIN = 2
# Below this share of arrivals served in time, still fewer replicas are not tried.
HOPELESS_SHARE = 0.5

Told = Callable[[float], None]
# What became of an interval's arrivals, by limits, interval and number of replicas.
Ends = dict[tuple[Limits, int, int], list[Flight]]


@dataclass(frozen=True, slots=True)
class Oracle:
    """replicas: per interval. misses: of its run, whose worth is `measures`. is_attained: whether any course
    reached the objective; if none did, this is the one with the highest attainment."""

    replicas: tuple[int, ...]
    limits: Limits
    measures: Measures
    is_attained: bool
    num_simulated: int


def find_oracle(
    trace: Trace,
    setting: Setting,
    told: Told = lambda share: None,
    ends: Ends | None = None,
    num_prices: int = NUM_PRICES,
) -> Oracle:
    """The oracle of a load; `told` hears how far the search has come, from 0 to 1.

    ends: what searches of the same load and setting, but for the promise, have found already; added to.
    num_prices: that are tried; with more it may be found to cost a little less.
    """
    setting = _free(_without_faults(setting))
    target = target_of(setting.service.spec)
    search = _Search(trace, setting, target, {} if ends is None else ends, num_prices)
    limits = search.choose_limits()
    search.limits = limits
    tables = []
    for index in range(search.num_intervals):
        tables.append(search.misses(index))
        told(0.5 * (index + 1) / search.num_intervals)
    return search.cheapest(tables, lambda share: told(0.5 + 0.5 * share))


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

    def __init__(self, trace: Trace, setting: Setting, target: Target, ends: Ends, num_prices: int) -> None:
        self._ends = ends
        self._num_prices = num_prices
        self._trace = trace
        self._setting = setting
        self._target = target
        self._times = [one.at_seconds for one in trace.arrivals]
        self.num_intervals = max(1, math.ceil(trace.duration_seconds / INTERVAL_SECONDS))
        self.limits = target.highest

    def choose_limits(self) -> Limits:
        """Step 1."""
        busiest = sorted(
            range(self.num_intervals), key=lambda i: -work_seconds(self._setting.engine.model, self._part(i))
        )[:NUM_BUSIEST]
        highest = self._target.highest
        best = (math.inf, math.inf)
        chosen = highest
        for halvings in range(NUM_TOKEN_CANDIDATES):
            tokens = highest.max_num_batched_tokens >> halvings
            self.limits = self._target.bound_limits(Limits(highest.max_num_seqs, tokens))
            found = [self._fewest(index) for index in busiest]
            rank = (sum(number for number, _ in found), sum(missed for _, missed in found))
            if rank < best:
                best, chosen = rank, self.limits
        return chosen

    def misses(self, index: int) -> dict[int, int]:
        """Step 2: misses by number of replicas, from the last hopeless one to the first without a miss."""
        count = len(self._part(index).arrivals)
        if count == 0:
            return {self._target.min_replicas: 0}
        lowest, highest = self._target.min_replicas, self._most()
        number = first = self._guess(index)
        table = {first: self._missed(index, first)}
        while table[number] > 0 and number < highest and not _is_in_vain(table, number):
            number += 1
            table[number] = self._missed(index, number)
        number = first
        while number > lowest and table[number] < count * HOPELESS_SHARE:
            number -= 1
            table[number] = self._missed(index, number)
        return table

    def cheapest(self, tables: Sequence[dict[int, int]], told: Told) -> Oracle:
        """Steps 3 and 4."""
        seen: dict[tuple[int, ...], Measures] = {}
        for margin in range(MOST_MARGIN + 1):
            self._bisect(tables, margin, seen, told)
            attained = [one for one in seen if self._attains(seen[one])]
            if attained:
                best = min(attained, key=lambda one: seen[one].replica_hours)
                return Oracle(best, self.limits, seen[best], is_attained=True, num_simulated=len(seen))
        best = max(seen, key=lambda one: seen[one].joint_attainment)
        return Oracle(best, self.limits, seen[best], is_attained=False, num_simulated=len(seen))

    def _bisect(
        self,
        tables: Sequence[dict[int, int]],
        margin: int,
        seen: dict[tuple[int, ...], Measures],
        told: Told,
    ) -> None:
        """Add to `seen` the courses at several prices, each with `margin` replicas more."""
        counts = [len(self._part(index).arrivals) for index in range(self.num_intervals)]
        cold = self._setting.conditions.cold_start_seconds
        numbers = range(self._target.min_replicas, max(max(table) for table in tables) + 1)
        low, high = math.log(LEAST_PRICE), math.log(MOST_PRICE)
        for turn in range(self._num_prices):
            price = high if turn == 0 else (low + high) / 2
            costs = Costs(INTERVAL_SECONDS, cold, math.exp(price))
            cheapest = cheapest_course(tables, counts, numbers, costs)
            course = tuple(min(self._most(), number + margin) for number in cheapest)
            if course not in seen:
                seen[course] = self._simulated(course)
            told((turn + 1) / self._num_prices)
            is_attained = self._attains(seen[course])
            if turn == 0:
                if not is_attained:
                    return  # no lower price will do
            elif is_attained:
                high = price
            else:
                low = price

    def _attains(self, found: Measures) -> bool:
        return found.joint_attainment * 100 >= self._target.percentile

    def _simulated(self, course: tuple[int, ...]) -> Measures:
        """A course, run whole."""
        conditions = replace(self._setting.conditions, initial_replicas=course[0])
        setting = replace(self._setting, conditions=conditions)
        controller = schedule(course, self.limits, conditions.cold_start_seconds, conditions.interval_seconds)
        run = Simulation(self._trace, self._limited(setting), controller).result()
        return measures(run, self._target, setting.engine.model.gpus, self._trace.step_at_seconds)

    def _limited(self, setting: Setting) -> Setting:
        """Replicas that begin with the limits chosen."""
        limits = EngineLimits(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        return replace(setting, engine=replace(setting.engine, limits=limits))

    def _fewest(self, index: int) -> tuple[int, int]:
        """The least number that attains the objective in an interval, and its misses."""
        allowed = len(self._part(index).arrivals) * (1 - self._target.percentile / 100)
        number = self._guess(index)
        table = {number: self._missed(index, number)}
        while table[number] > allowed and number < self._most() and not _is_in_vain(table, number):
            number += 1
            table[number] = self._missed(index, number)
        while table[number] <= allowed and number > self._target.min_replicas:
            table[number - 1] = self._missed(index, number - 1)
            if table[number - 1] > allowed:
                break
            number -= 1
        return number, table[number]

    def _missed(self, index: int, number: int) -> int:
        """Of an interval's arrivals, those that miss on so many replicas."""
        key = (self.limits, index, number)
        if key not in self._ends:
            self._ends[key] = self._served(index, number)
        targets = self._target.targets
        return sum(
            not one.meets(targets.ttft_milliseconds, targets.tpot_milliseconds) for one in self._ends[key]
        )

    def _served(self, index: int, number: int) -> list[Flight]:
        """What becomes of an interval's arrivals on so many replicas."""
        start = index * INTERVAL_SECONDS
        begin = max(0.0, start - WARM_UP_SECONDS)
        part = part_of(self._trace, begin, start + INTERVAL_SECONDS + COOL_DOWN_SECONDS)
        setting = self._limited(self._setting)
        setting = replace(setting, conditions=replace(setting.conditions, initial_replicas=number))
        first = bisect_left(self._times, start) - bisect_left(self._times, begin)
        last = first + len(self._part(index).arrivals)
        return Simulation(part, setting, None).result(stops_after=range(first, last)).flights[first:last]

    def _part(self, index: int) -> Trace:
        start = index * INTERVAL_SECONDS
        end = min(start + INTERVAL_SECONDS, self._trace.duration_seconds)
        first, last = bisect_left(self._times, start), bisect_left(self._times, end)
        return Trace("", self._trace.arrivals[first:last], end - start)

    def _guess(self, index: int) -> int:
        guess = guessed_replicas(self._setting.engine.model, self._part(index))
        return max(self._target.min_replicas, min(self._most(), guess))

    def _most(self) -> int:
        return min(self._target.max_replicas, self._setting.conditions.most_pods)


def _is_in_vain(table: dict[int, int], number: int) -> bool:
    """Whether the last replicas added have helped nobody: what misses now misses with any number."""
    return table[number] >= table.get(number - VAIN_REPLICAS, math.inf)


def schedule(
    course: Sequence[int], limits: Limits, cold_start_seconds: float, interval_seconds: float
) -> Controller[None]:
    """A controller that knows its course, and asks for replicas so early that they are ready in time."""
    unknown = Attainment(None, None, 0, 0, "unknown")
    ahead = cold_start_seconds + 2 * interval_seconds

    def decide(
        target: Target, memory: None, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, None]:
        first = int((now - BEGIN_SECONDS) // INTERVAL_SECONDS)
        last = int((now - BEGIN_SECONDS + ahead) // INTERVAL_SECONDS)
        within = course[min(first, len(course) - 1) : last + 1]
        replicas = target.bound_replicas(max(within))
        decision = Decision(now, replicas, limits, "Scheduled", "as known before", "", unknown, unknown, {})
        return decision, None

    return Controller("oracle", lambda sample, now: None, decide)

"""What one replica is worth and what load is coming: the numbers from which replicas and limits follow.

Each pass learns a little: the step model from sums over steps, the work of requests, how latencies at the
percentile stand to what the model says of them, how long a replica takes until it is ready, how the load
behaves. How far the whole is trusted is `trust`.

The percentile. A request that misses either of two promises has not been served as promised, and mostly they
are not the same requests. So each is sized for what the other leaves of the misses that the objective allows:
by what was missed of the one that is missed less, and for SHARE_OF_MISSES until enough requests were judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log
from typing import Any

from headway_operator.samples import Limits
from headway_operator.slo import histogram, usual
from headway_operator.slo.baselines import Baseline
from headway_operator.slo.best_limits import best_capacity, highest_rate, with_places
from headway_operator.slo.capacity import Replica
from headway_operator.slo.forecast import Forecast, forecast, watched
from headway_operator.slo.memory import Memory
from headway_operator.slo.pace import AS_TOLD, Pace, pace
from headway_operator.slo.predictions import Capacity, Factors, Latencies, Workload
from headway_operator.slo.step_fit import learnt
from headway_operator.slo.target import Target
from headway_operator.slo.window import Recent, step_increments
from headway_operator.state import Observed

SHARE_OF_MISSES, LEAST_SHARE_OF_MISSES = 0.7, 0.5
WORKLOAD_SECONDS = 300.0
# What requests bring is taken from the shortest of these times that has enough, else from the longest.
WORKLOAD_WINDOWS = (60.0, 120.0, WORKLOAD_SECONDS)
LEAST_REQUESTS, ENOUGH_REQUESTS = 20, 1000
CALIBRATION_SECONDS = 120.0
LEAST_CALIBRATION_SECONDS = 30.0
LEAST_JUDGED = 60
# A percentile is known by the requests beyond it. What a pass tells of it counts by those that came since the
# last one that learnt, where the rate was within NEAR of what a replica can do. What was known before counts
# as at most MOST_BEYOND of them, or those of LONGEST_KNOWN_SECONDS if they are more; that nothing is wrong,
# the first guess, as FIRST_BEYOND.
FIRST_BEYOND, MOST_BEYOND, LONGEST_KNOWN_SECONDS = 0.2, 20.0, 100.0
NEAR = 1.5
# Tokens that come in less than this share of what a step takes beside nothing else are several for each step.
GUESSED = 0.9
# Of requests that are judged there must be so many beyond the percentile, where misses are to be shared out.
LEAST_BEYOND = 5.0
# Of TTFT, which queueing makes hard to tell, and of TPOT and steps.
LEAST_TTFT_FACTOR, LEAST_FACTOR, MOST_FACTOR = 0.15, 0.4, 3.0
FIRST_LEAD_SECONDS = 60.0
LEAST_LEAD_SECONDS = 10.0
NUM_STARTS = 20
LEAD_PERCENT = 90
# Of a wait for a node, what a cluster takes that adds one; who waits for longer waits for room.
MOST_PLACING_SECONDS = 600.0
WARM_UP_SECONDS, FIRST_SECONDS = 60.0, 10.0
# So many replicas tell in a pass all that the step model keeps; those of a large fleet take turns.
MOST_TEACHERS, GOLDEN = 24, 0.6180339887498949
# A model is not asked about contexts so many times as long as those that it was fitted to.
CONTEXT_STRETCH = 2.0
# While somebody is late, and for so long after, limits are those that serve most, whatever is applied.
CALM_SECONDS = 10.0
# However far the quantiles are, a replica does so much of what its device could; and so much if only TTFT is
# predicted to be missed then, whose percentile hangs on a tail of prompts that is not known.
LEAST_UTILIZATION, NEARLY_IDLE = 0.05, 0.2
# Fewer of its own group before a request are none.
LEAST_BEFORE = 0.01


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is known of a replica and of the load to come. number: of replicas that share the load. is_routed:
    whether a gateway gives each request to the least loaded. pace: of steps.
    least_per_second: what a replica is taken to do, whatever is predicted of latencies; but for groups it
    would be doubtful_per_second, 0 where nothing is doubted. ceiling: the most
    that one was seen to do. drift: how much more work requests usually bring than these minutes, over what
    these bring, 0 at least; None while that is not known. is_of_now: whether what requests bring is that of
    the last minutes, and not of some time before."""

    replica: Replica
    capacity: Capacity
    factors: Factors
    kappa: float
    pace: Pace = AS_TOLD
    least_per_second: float = 0.0
    doubtful_per_second: float = 0.0
    ceiling: float = inf
    drift: float | None = None
    is_of_now: bool = True
    number: int = 1
    is_routed: bool = True

    @property
    def told_per_second(self) -> float:
        """What the model tells of one replica, as far as it is trusted. No trust makes more places, memory or
        time."""
        return min(self.kappa * self.capacity.per_second, self.capacity.bound)

    @property
    def bound(self) -> float:
        """Requests that one replica cannot do more of, whatever the latencies."""
        return min(self.capacity.bound, self.ceiling)

    @property
    def per_second(self) -> float:
        """Requests that one replica is trusted with."""
        return min(self.told_per_second, self.ceiling)

    def takes(self, target: Target, number: int, rate: float, share: float = 1.0) -> bool:
        """Whether so many replicas could take a rate within a share of the targets. With fewer to choose from
        a gateway gives each of them more that come at once."""
        if rate > number * self.bound:
            return False
        replica, each = self.among(number), rate / number / self.kappa
        if each <= max(self.least_per_second, self.doubtful_per_second):
            least = self.least_per_second
            if replica.before != self.replica.before:
                least = _least_with_groups(replica, target, self.factors, self.doubtful_per_second)
            if each <= least:
                return True
        return replica.keeps(each, self.capacity.limits, self.factors, target, share)

    def among(self, number: int) -> Replica:
        """One of so many replicas that share the load."""
        if self.is_routed:
            return replace(self.replica, fleet=number)
        return replace(self.replica, burst=self.replica.burst * self.number / number)


def with_learning(
    memory: Memory, before: Mapping[str, Baseline], happened: Recent, observed: Observed, now: float
) -> Memory:
    """The memory with the step model, the start-up time and the course of the load brought up to date."""
    # A service whose replicas are all young is known by these until one has warmed up.
    known = _ready_since(observed, now - WARM_UP_SECONDS) or _ready_since(observed, now - FIRST_SECONDS)
    fit = learnt(memory.fit, step_increments(before, memory.baselines, by_turns(known, now)))
    return memory._replace(
        fit=fit,
        course=watched(memory.course, happened.arrivals, now, lead_seconds(memory)),
        starts=_starts(memory, observed, now),
    )


def _ready_since(observed: Observed, at: float) -> list[str]:
    return [
        one.name
        for one in observed.replicas
        if one.phase == "ready" and one.ready_at is not None and one.ready_at <= at
    ]


def by_turns(names: Sequence[str], now: float) -> Sequence[str]:
    """At most MOST_TEACHERS of them, mostly others in the next pass, however far apart passes are: multiples
    of an irrational number fall evenly between whole ones."""
    turns = ceil(len(names) / MOST_TEACHERS)
    return names if turns <= 1 else names[int(turns * (now * GOLDEN % 1.0)) :: turns]


def _starts(memory: Memory, observed: Observed, now: float) -> tuple[tuple[float, float], ...]:
    """(ready at, seconds since it was made) of the latest replicas, without a long wait for room; what was
    restarted did not start."""
    known = {at for at, _ in memory.starts}
    oldest = memory.starts[0][0] if len(memory.starts) == NUM_STARTS else memory.began_at
    new = sorted(
        (
            one.ready_at,
            one.ready_at - one.created_at - max(0.0, one.start.scheduled_seconds - MOST_PLACING_SECONDS),
        )
        for one in observed.replicas
        if one.ready_at is not None
        and one.start is not None
        and one.ready_at > one.created_at
        and oldest < one.ready_at <= now
        and one.ready_at not in known
    )
    return tuple(sorted((*memory.starts, *new)))[-NUM_STARTS:]


def lead_seconds(memory: Memory) -> float:
    """The P90 of what replicas took until they were ready."""
    seconds = sorted(seconds for _, seconds in memory.starts)
    if not seconds:
        return FIRST_LEAD_SECONDS
    return max(LEAST_LEAD_SECONDS, seconds[ceil(len(seconds) * LEAD_PERCENT / 100) - 1])


def expected(target: Target, memory: Memory, happened: Recent, now: float) -> Forecast:
    """The load when replicas asked for now are ready."""
    return forecast(memory.course, happened.arrivals, now, lead_seconds(memory), target.patience_seconds)


def aimed_percent(target: Target, happened: Recent, now: float) -> float:
    """The percentile that each promise is sized for."""
    allowed = 100.0 - target.percentile
    if target.targets.ttft_milliseconds is None or target.targets.tpot_milliseconds is None:
        return 100.0 - allowed
    totals = happened.totals(now - WORKLOAD_SECONDS)
    shares = []
    for name in ("ttft", "tpot"):
        missed = totals.get(f"{name}_missed", 0.0)
        judged = totals.get(f"{name}_met", 0.0) + missed
        is_known = judged * allowed >= 100.0 * LEAST_BEYOND
        shares.append(1.0 - missed / judged / allowed * 100.0 if is_known else SHARE_OF_MISSES)
    return 100.0 - allowed * max(LEAST_SHARE_OF_MISSES, *shares)


def sizing(
    target: Target, memory: Memory, happened: Recent, number: int, now: float, *, is_routed: bool
) -> Sizing | None:
    """What one replica is worth, of so many that share the load; None while no model or workload is known.
    is_routed: whether a gateway gives each request to the least loaded."""
    latest = workload(happened, now)
    work = latest or memory.workload
    if memory.fit.model is None or work is None:
        return None
    # Of answers that are over the model may have seen nothing: where sequences attend to much the same number
    # of tokens, it cannot tell what a token costs from what a sequence does.
    seen = memory.fit.context or work.context
    work = replace(work, context=min(work.context, CONTEXT_STRETCH * seen))
    steps = pace(happened, now, memory.pace)
    percent = aimed_percent(target, happened, now)
    is_calm = memory.late_at is None or now - memory.late_at >= CALM_SECONDS
    applied = memory.limits if is_calm else None
    burst = memory.course.groups.index - 1.0
    fleet, burst = (number, burst) if is_routed else (1, burst / number)
    replica = Replica(memory.fit.model.slower(steps.times), work, percent, fleet, applied, burst)
    factors = _with_guesses(target, replica, memory.factors, happened, now)
    capacity = best_capacity(replica, target, factors)
    doubtful = _doubtful_per_second(target, replica, capacity, factors)
    least = _least_with_groups(replica, target, factors, doubtful)
    per_second = max(capacity.per_second, least)
    limits = capacity.limits
    if per_second > capacity.per_second:
        # It will be given more than it was taken to do, and needs the places.
        limits = with_places(replica, limits, per_second, target, factors)
    bound = max(per_second, capacity.bound)
    capacity = replace(capacity, per_second=per_second, limits=limits, bound=bound)
    known = memory.ceiling
    ceiling = inf if known is None else known.of(work, capacity.limits.max_num_seqs)
    drift = usual.drift(memory.usual, replica)
    return Sizing(
        replica,
        capacity,
        factors,
        memory.kappa,
        steps,
        least_per_second=least,
        doubtful_per_second=doubtful,
        ceiling=ceiling,
        drift=drift,
        is_of_now=latest is not None,
        number=number,
        is_routed=is_routed,
    )


def _with_guesses(
    target: Target, replica: Replica, factors: Factors, happened: Recent, now: float
) -> Factors:
    """The factors with one for TPOT that is no higher than what comes of guesses on any load.

    Steps that check guesses tell the model nothing, and limits that follow from what plain steps take would
    leave a replica so few places that nothing could be learnt of it: so it is at once what is measured, over
    what a replica takes that has nothing else to do.
    """
    counts = happened.counts("tpot", now - CALIBRATION_SECONDS)
    measured = histogram.percentile(counts, replica.percent)
    if measured is None or sum(counts.values()) < LEAST_JUDGED:
        return factors
    alone = replica.idle(target.bound_limits(target.highest)).tpot
    most = measured / alone if alone > 0.0 else inf
    return factors if most >= min(GUESSED, factors.tpot) else replace(factors, tpot=max(LEAST_FACTOR, most))


def _doubtful_per_second(target: Target, replica: Replica, found: Capacity, factors: Factors) -> float:
    """What a replica is taken to do where more is predicted to break TTFT, for the tail of prompts is not
    known; 0 where nothing is doubted. Without what groups make of it."""
    doubtful, targets = NEARLY_IDLE * replica.most_per_second, target.targets
    if found.per_second >= doubtful or targets.ttft_milliseconds is None:
        return 0.0
    without = replace(target, targets=replace(targets, ttft_milliseconds=None))
    return min(doubtful, best_capacity(replica, without, factors).per_second)


def _least_with_groups(replica: Replica, target: Target, factors: Factors, doubtful: float) -> float:
    """What a replica is taken to do, whatever is predicted of latencies: of what is doubted because of the
    tail of prompts, the share that groups leave of it if prompts are all alike, as these are not in doubt."""
    least = LEAST_UTILIZATION * replica.most_per_second
    if doubtful <= least or replica.before < LEAST_BEFORE:
        return max(least, doubtful)
    limits, even = target.bound_limits(target.highest), with_even_prompts(replica)
    kept, calm = (highest_rate(one, target, limits, factors) for one in (even, replace(even, burst=0.0)))
    return max(least, doubtful * min(1.0, (kept + least) / (calm + least)))


def idle_latencies(target: Target, replica: Replica, factors: Factors) -> Latencies:
    """What the percentile's request sees on a replica that has nothing else to do.

    It shares its steps with nobody, so nothing is saved by a smaller budget. Where less was measured of TTFT
    than predicted, prompts are less spread than the lognormal that they are taken for; but a mean one takes
    as long as it does.
    """
    lone = replace(replica, percent=float(target.percentile))
    limits = target.bound_limits(target.highest)
    found = lone.idle(limits)
    even = with_even_prompts(lone).idle(limits)
    return found._replace(ttft=max(even.ttft, min(1.0, factors.ttft) * found.ttft))


def with_even_prompts(replica: Replica) -> Replica:
    """The same replica, if all prompts were alike."""
    return with_work(replica, prompt_square=replica.workload.prompt**2)


def with_work(replica: Replica, **changes: float) -> Replica:
    """The same replica under another workload."""
    return replace(replica, workload=replace(replica.workload, **changes))


def workload(happened: Recent, now: float) -> Workload | None:
    """What requests of the last minutes brought; None where there were too few."""
    for seconds in WORKLOAD_WINDOWS:
        totals = happened.totals(now - seconds)
        prompts, answers = totals.get("prompts", 0.0), totals.get("answers", 0.0)
        if min(prompts, answers) >= ENOUGH_REQUESTS:
            break
    if min(prompts, answers) < LEAST_REQUESTS:
        return None
    decoded, ran = totals.get("decoded", 0.0), totals.get("ran", 0.0)
    return Workload(
        prompt=totals.get("prompt_sum", 0.0) / prompts,
        prompt_square=totals.get("prompt_squares", 0.0) / prompts,
        answer=totals.get("answer_sum", 0.0) / answers,
        context=totals.get("attended", 0.0) / decoded if decoded else 0.0,
        kv_share=totals.get("kv_held", 0.0) / ran if ran else 0.0,
        tokens=totals.get("prompt_tokens", 0.0) / prompts,
    )


def calibrated(
    memory: Memory, happened: Recent, found: Sizing, limits: Limits, ready: int, settled_at: float, now: float
) -> Memory:
    """The memory with the factors after one more pass: measured over predicted, where both say something."""
    since = max(settled_at, now - CALIBRATION_SECONDS)
    if now - since < LEAST_CALIBRATION_SECONDS or not ready:
        return memory
    seconds = happened.seconds(since)
    if seconds < LEAST_CALIBRATION_SECONDS / 2.0:
        return memory
    rate = happened.totals(since).get("arrived", 0.0) / seconds / ready
    plain = found.among(ready).latencies(rate, limits, Factors())
    is_near = 1.0 / NEAR <= rate / found.per_second <= NEAR
    # Windows of two passes share most of what they saw.
    passed = seconds if memory.factors_at is None else max(0.0, min(seconds, now - memory.factors_at))
    changes: dict[str, Any] = {}
    for name in ("ttft", "tpot"):
        counts, predicted = happened.counts(name, since), getattr(plain, name)
        measured = histogram.percentile(counts, found.replica.percent)
        if measured is None or sum(counts.values()) < LEAST_JUDGED or not 0.0 < predicted < inf:
            continue
        if name == "tpot" and plain.is_bounded:
            continue  # how wrong the longest step is told is for `pace` to say
        least = LEAST_TTFT_FACTOR if name == "ttft" else LEAST_FACTOR
        ratio = min(MOST_FACTOR, max(least, measured / predicted))
        before, known = getattr(memory.factors, name), getattr(memory.factors, f"num_{name}")
        beyond = sum(counts.values()) * (100.0 - found.replica.percent) / 100.0
        per_second = beyond / seconds
        new, most = passed * per_second, max(MOST_BEYOND, LONGEST_KNOWN_SECONDS * per_second)
        weight = new / (most + new)
        if is_near:
            weight = max(weight, new / (FIRST_BEYOND + known + new))
            changes[f"num_{name}"] = min(known + new, most)
        changes[name] = exp(log(before) + weight * (log(ratio) - log(before)))
    if not changes:
        return memory
    return memory._replace(factors=replace(memory.factors, **changes), factors_at=now)

"""The limits with which one replica serves most within both targets, and how much that is.

budget    of the highest one and its halves the best, where it promises LEAST_GAIN more than the next larger
          one; but one of which no step takes longer than TPOT may be where that costs next to nothing (even
          steps).
places    as many as keep TPOT with all of them taken, and as many as run at such a rate; or few of them and a
          queue for these, where that serves more.

Of two kinds that are nearly as good the one that is applied stays (`leaning`).
"""

from bisect import bisect_right
from dataclasses import replace
from math import inf, sqrt

from headway_operator.samples import Limits, Targets
from headway_operator.slo.capacity import MOST_KV_USE, Replica
from headway_operator.slo.leaning import LEANING, is_nearer
from headway_operator.slo.predictions import Capacity, Factors
from headway_operator.slo.target import Target

# Halvings of the token budget that are considered.
NUM_BUDGETS = 4
# A smaller budget must promise so much more: what a model says of small steps is worth less.
LEAST_GAIN = 1.05
# But one of which no step is longer than TPOT may be is preferred if it keeps this share of the rate where a
# replica is alone, down to that of a large fleet, where prompts wait for less than is told, and if it has no
# fewer tokens than this.
EVEN_STEPS_SHARE, LEAST_EVEN_STEPS_SHARE, LEAST_EVEN_TOKENS = 0.95, 0.8, 16.0
# They take no more than this share of the target: what a prompt's token costs is the engine's estimate.
EVEN_STEPS_USE = 0.95
# Of a queue for few places, which grows fast next to its limit, a replica is trusted with this share.
QUEUE_USE = 0.9
# The limit on sequences leaves at least so many standard deviations above the mean number.
SEQUENCE_DEVIATIONS = 1.0
BISECTIONS, ROUGH_BISECTIONS = 10, 6


def best_capacity(replica: Replica, target: Target, factors: Factors) -> Capacity:
    """At the best feasible limits, whatever is applied today; but for a kind that is nearly as good."""
    best: tuple[float, Limits] | None = None
    for halvings in range(NUM_BUDGETS):
        limits = target.with_token_budget(target.highest.max_num_batched_tokens >> halvings)
        if best is None:
            best = (highest_rate(replica, target, limits, factors), limits)
            continue
        # Not looked for where it cannot be found: latencies only grow with the rate.
        wanted = best[0] * LEAST_GAIN
        if limits == best[1] or not replica.keeps(wanted, limits, factors, target):
            continue
        found = highest_rate(replica, target, limits, factors, wanted)
        if found > wanted:
            best = (found, limits)
    assert best is not None
    per_second, limits = _with_even_steps(replica, best, target, factors)
    full = _full_sequences(replica, limits, target, factors)
    few = target.bound_limits(Limits(full, limits.max_num_batched_tokens))
    limits = with_places(replica, few, per_second, target, factors)
    unpromised = replace(target, targets=Targets())
    bound = max(per_second, highest_rate(replica, unpromised, target.highest, factors))
    return _with_few_places(replica, Capacity(per_second, limits, bound, full), target, factors)


def _with_few_places(replica: Replica, found: Capacity, target: Target, factors: Factors) -> Capacity:
    """As many places as keep TPOT while all are taken, and a queue for them, where that serves more."""
    highest, full = target.highest, found.full_num_seqs
    if found.limits.max_num_batched_tokens != highest.max_num_batched_tokens:
        full = _full_sequences(replica, highest, target, factors)
    limits = target.bound_limits(Limits(full, highest.max_num_batched_tokens))
    gain = 1.0 if is_nearer(replica.applied, limits, found.limits) else LEAST_GAIN
    wanted = gain * found.per_second
    is_more = limits.max_num_seqs > found.limits.max_num_seqs
    if is_more or not replica.keeps(wanted, limits, factors, target):
        return found
    per_second = max(found.per_second, QUEUE_USE * highest_rate(replica, target, limits, factors, wanted))
    return Capacity(per_second, limits, max(per_second, found.bound), limits.max_num_seqs, QUEUE_USE)


def _with_even_steps(
    replica: Replica, best: tuple[float, Limits], target: Target, factors: Factors
) -> tuple[float, Limits]:
    """The largest token budget of which no step takes longer than TPOT may, where it costs next to
    nothing: TPOT hangs on no guess of how prompts are spread then."""
    wanted = target.targets.tpot_milliseconds
    if wanted is None or replica.model.prefill <= 0.0 or best[0] <= 0.0:
        return best
    rate, limits = best
    # The rate says how many run, and these how many prompt tokens fit: roughly at first.
    lost_alone, lost = 1.0 - EVEN_STEPS_SHARE, 1.0 - LEAST_EVEN_STEPS_SHARE
    least = best[0] * (1.0 - lost + (lost - lost_alone) / replica.fleet)
    for bisections in (ROUGH_BISECTIONS, BISECTIONS):
        tokens = _even_tokens(replica, rate, wanted, target.highest)
        if not LEAST_EVEN_TOKENS <= tokens < inf:
            return best
        tokens = min(tokens, target.highest.max_num_batched_tokens)
        limits = target.with_token_budget(int(tokens))
        needed = LEANING * least if is_nearer(replica.applied, limits, best[1]) else least
        # Not looked for where it cannot be found, as above.
        if not replica.keeps(needed, limits, factors, target):
            return best
        rate = highest_rate(replica, target, limits, factors, needed, bisections)
    return rate, limits


def _even_tokens(replica: Replica, per_second: float, milliseconds: float, highest: Limits) -> float:
    """Of a step that takes so long, beside the sequences that run at such a rate; may be no number."""
    crowd = replica.crowd(replica.latencies(per_second, highest, Factors()).running)
    left = EVEN_STEPS_USE * milliseconds - replica.model.base - replica.token * crowd
    return crowd + left / replica.model.prefill


def highest_rate(
    replica: Replica,
    target: Target,
    limits: Limits,
    factors: Factors,
    low: float = 0.0,
    bisections: int = BISECTIONS,
) -> float:
    """The highest rate that keeps the promise, per second. low: one that is known to."""
    high = max(low, replica.most_per_second)
    for _ in range(bisections):
        middle = (low + high) / 2.0
        if replica.keeps(middle, limits, factors, target):
            low = middle
        else:
            high = middle
    return low


def with_places(
    replica: Replica, limits: Limits, per_second: float, target: Target, factors: Factors
) -> Limits:
    """The limits with places for such a rate at least; as they are where that is more than can be."""
    unlimited = Limits(target.highest.max_num_seqs, limits.max_num_batched_tokens)
    running = replica.latencies(per_second, unlimited, factors).running
    if running == inf:
        return limits
    spread = max(SEQUENCE_DEVIATIONS * sqrt(running), replica.deviations * replica.uneven(running))
    needed = int(running + spread + 1.0)
    return target.bound_limits(replace(unlimited, max_num_seqs=max(limits.max_num_seqs, needed)))


def _full_sequences(replica: Replica, limits: Limits, target: Target, factors: Factors) -> int:
    """As many as keep TPOT and memory with all places taken all the time."""
    tpot = target.targets.tpot_milliseconds
    highest = min(target.highest.max_num_seqs, limits.max_num_batched_tokens)
    if replica.workload.kv_share > 0.0:
        highest = max(1, min(highest, int(MOST_KV_USE / replica.workload.kv_share)))
    if tpot is None:
        return highest
    taken = range(1, highest + 1)
    # Whatever is guessed of prompts, no token comes later than the longest step: beside one sequence, or
    # beside the most.
    bounded = 0
    if replica.longest_step(1, limits) <= tpot:
        bounded = bisect_right(taken, tpot, key=lambda number: replica.longest_step(number, limits))
    if bounded == highest:
        return highest
    guessed = bisect_right(taken, tpot, key=lambda number: replica.full_tpot(number, factors))
    return max(1, bounded, guessed)

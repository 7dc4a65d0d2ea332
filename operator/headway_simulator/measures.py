"""What a run was worth: judged by arrivals, so that a request that never ended is a miss. Pure.

joint attainment    share of arrivals that ended well and met both targets
worst 5 minutes     the least such share over windows of five minutes, begun every WINDOW_STEP_SECONDS, with
                    LEAST_ARRIVALS arrivals at least (fewer say nothing of a percentile); None without any
GPU-hours           of all pods from their place on a node until they were gone, starting and draining
                    included, within the time of the load
actions             passes that changed replicas or limits; reversals: changes of replicas in the other
                    direction than the change before; limit reversals: the same of max_num_seqs
recovery            after a known jump of the load: until the first moment from which the arrivals of each
                    BIN_SECONDS meet the objective for RECOVERED_SECONDS; None if that never comes
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headway_operator.slo import Target
from headway_simulator.records import Flight, Run
from headway_simulator.trace import percentile_of

WORST_WINDOW_SECONDS = 300.0
WINDOW_STEP_SECONDS = 30.0
LEAST_ARRIVALS = 20
BIN_SECONDS = 10.0
RECOVERED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Measures:
    """See the header. Latencies are those of requests that have them, at the objective's percentile."""

    num_arrivals: int
    joint_attainment: float
    ttft_attainment: float
    tpot_attainment: float
    worst_five_minutes: float | None
    ttft_milliseconds: float | None
    tpot_milliseconds: float | None
    num_rejected: int
    num_lost: int
    num_unfinished: int
    replica_hours: float
    gpu_hours: float
    mean_replicas: float
    most_replicas: int
    actions_per_hour: float
    reversals_per_hour: float
    limit_reversals_per_hour: float
    recovery_seconds: float | None
    num_preemptions: int
    cached_share: float


def measures(
    run: Run, target: Target, gpus_per_replica: int, step_at_seconds: float | None = None
) -> Measures:
    """Judge a run. step_at_seconds: of a jump of the load, from the run's start."""
    targets, flights = target.targets, run.flights
    met = [one.meets(targets.ttft_milliseconds, targets.tpot_milliseconds) for one in flights]
    fates = Counter(one.fate for one in flights)
    hours = (run.ends_at - run.starts_at) / 3600
    replica_seconds = sum(_overlap(pod.placed_at, pod.gone_at, run) for pod in run.pods)
    moves = [_sign(after - before) for before, after in pairwise(one.replicas for one in run.passes)]
    seqs = [_sign(b.limits.max_num_seqs - a.limits.max_num_seqs) for a, b in pairwise(run.passes)]
    num_actions = sum((a.replicas, a.limits) != (b.replicas, b.limits) for a, b in pairwise(run.passes))
    step_at = None if step_at_seconds is None else run.starts_at + step_at_seconds
    return Measures(
        num_arrivals=len(flights),
        joint_attainment=_share(met),
        ttft_attainment=_share([one.meets(targets.ttft_milliseconds, None) for one in flights]),
        tpot_attainment=_share([one.meets(None, targets.tpot_milliseconds) for one in flights]),
        worst_five_minutes=_worst(run, met),
        ttft_milliseconds=_latency((one.ttft_seconds for one in flights), target.percentile),
        tpot_milliseconds=_latency((one.tpot_seconds for one in flights), target.percentile),
        num_rejected=fates["rejected"],
        num_lost=fates["lost"],
        num_unfinished=fates["unfinished"],
        replica_hours=replica_seconds / 3600,
        gpu_hours=replica_seconds / 3600 * gpus_per_replica,
        mean_replicas=replica_seconds / 3600 / hours,
        most_replicas=_most_at_once(run),
        actions_per_hour=num_actions / hours,
        reversals_per_hour=reversals(moves) / hours,
        limit_reversals_per_hour=reversals(seqs) / hours,
        recovery_seconds=None if step_at is None else _recovery(flights, met, step_at, run, target),
        num_preemptions=run.num_preemptions,
        cached_share=run.num_cached_tokens / max(1, run.num_cached_tokens + run.num_prompt_tokens),
    )


def judged_from(run: Run, seconds: float) -> Run:
    """What arrives and happens from so long after the start on; pods cost what they cost from then on."""
    begin = run.starts_at + seconds
    return replace(
        run,
        starts_at=begin,
        flights=[one for one in run.flights if one.arrived_at >= begin],
        passes=[one for one in run.passes if one.at >= begin],
    )


def reversals(moves: Iterable[int]) -> int:
    """How often the sign turns, zeros left out."""
    signs = [_sign(move) for move in moves if move]
    return sum(before != after for before, after in pairwise(signs))


def _sign(move: int) -> int:
    return (move > 0) - (move < 0)


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met) if met else 1.0


def _latency(seconds: Iterable[float | None], percent: int) -> float | None:
    known = [one for one in seconds if one is not None]
    return 1000 * percentile_of(known, percent) if known else None


def _overlap(begin: float, end: float | None, run: Run) -> float:
    return max(0.0, min(run.ends_at, run.ends_at if end is None else end) - max(run.starts_at, begin))


def _most_at_once(run: Run) -> int:
    paid = [pod for pod in run.pods if _overlap(pod.placed_at, pod.gone_at, run) > 0]
    changes = [(pod.placed_at, 1) for pod in paid]
    changes += [(pod.gone_at, -1) for pod in paid if pod.gone_at is not None]
    most = current = 0
    for _, change in sorted(changes):
        current += change
        most = max(most, current)
    return most


def _worst(run: Run, met: Sequence[bool]) -> float | None:
    """None where no window has arrivals enough, or the load is shorter than one."""
    if run.ends_at - run.starts_at < WORST_WINDOW_SECONDS:
        return None
    times = [one.arrived_at for one in run.flights]
    shares = []
    start = run.starts_at
    while True:
        first, end = bisect_left(times, start), bisect_left(times, start + WORST_WINDOW_SECONDS)
        if end - first >= LEAST_ARRIVALS:
            shares.append(_share(met[first:end]))
        start += WINDOW_STEP_SECONDS
        if start + WORST_WINDOW_SECONDS > run.ends_at:
            return min(shares, default=None)


def _recovery(
    flights: Sequence[Flight], met: Sequence[bool], step_at: float, run: Run, target: Target
) -> float | None:
    times = [one.arrived_at for one in flights]
    start = step_at
    while start + RECOVERED_SECONDS <= run.ends_at:
        bins = [start + BIN_SECONDS * index for index in range(int(RECOVERED_SECONDS / BIN_SECONDS))]
        if all(
            _share(met[bisect_left(times, at) : bisect_left(times, at + BIN_SECONDS)]) * 100
            >= target.percentile
            for at in bins
        ):
            return start - step_at
        start += BIN_SECONDS
    return None

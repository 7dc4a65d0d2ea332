"""A run minute by minute, and hour by hour: load, replicas, limits and latencies, for reports and pictures.
Decides nothing."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway_operator.slo import Target
from headway_simulator.records import Flight, Run
from headway_simulator.trace import percentile_of

BIN_SECONDS = 60.0
HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Minute:
    """at_seconds: from the load's start. wanted, ready, limits: at the end; None before the first pass.

    joint_attainment and latencies, at the objective's percentile, of what arrived in it; None of nothing.
    """

    at_seconds: float
    requests_per_second: float
    wanted: int | None
    ready: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    joint_attainment: float | None
    ttft_milliseconds: float | None
    tpot_milliseconds: float | None


@dataclass(frozen=True, slots=True)
class Level:
    """at_seconds: from the load's start. wanted, limits: from then on; ready: what was there."""

    at_seconds: float
    wanted: int
    ready: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Hour:
    """at_seconds: from the load's start. joint_attainment: of what arrived in it; None of nothing.
    replicas: on average, starting and draining ones included."""

    at_seconds: float
    requests_per_second: float
    replicas: float
    joint_attainment: float | None


def levels(run: Run) -> list[Level]:
    """What was wanted and there, whenever one of the numbers had changed."""
    found: list[Level] = []
    for one in run.passes:
        limits = one.limits.max_num_seqs, one.limits.max_num_batched_tokens
        level = Level(one.at - run.starts_at, one.replicas, one.num_ready, *limits)
        if one.at < run.ends_at and (
            not found or replace(level, at_seconds=found[-1].at_seconds) != found[-1]
        ):
            found.append(level)
    return found


def by_hour(run: Run, target: Target) -> list[Hour]:
    """The hours of a run, the last one perhaps shorter."""
    arrived = [one.arrived_at for one in run.flights]
    hours = []
    start = run.starts_at
    while start < run.ends_at:
        end = min(start + HOUR_SECONDS, run.ends_at)
        flights = run.flights[bisect_left(arrived, start) : bisect_left(arrived, end)]
        held = sum(
            max(0.0, min(end, end if pod.gone_at is None else pod.gone_at) - max(start, pod.placed_at))
            for pod in run.pods
        )
        hours.append(
            Hour(
                at_seconds=start - run.starts_at,
                requests_per_second=len(flights) / (end - start),
                replicas=held / (end - start),
                joint_attainment=_attained(flights, target),
            )
        )
        start = end
    return hours


def timeline(run: Run, target: Target) -> list[Minute]:
    """The minutes of a run, the last one perhaps shorter."""
    arrived = [one.arrived_at for one in run.flights]
    decided = [one.at for one in run.passes]
    minutes = []
    start = run.starts_at
    while start < run.ends_at:
        end = min(start + BIN_SECONDS, run.ends_at)
        flights = run.flights[bisect_left(arrived, start) : bisect_left(arrived, end)]
        number = bisect_right(decided, end)
        last = run.passes[number - 1] if number else None
        minutes.append(
            Minute(
                at_seconds=start - run.starts_at,
                requests_per_second=len(flights) / (end - start),
                wanted=None if last is None else last.replicas,
                ready=None if last is None else last.num_ready,
                max_num_seqs=None if last is None else last.limits.max_num_seqs,
                max_num_batched_tokens=None if last is None else last.limits.max_num_batched_tokens,
                joint_attainment=_attained(flights, target),
                ttft_milliseconds=_latency([one.ttft_seconds for one in flights], target.percentile),
                tpot_milliseconds=_latency([one.tpot_seconds for one in flights], target.percentile),
            )
        )
        start = end
    return minutes


def _attained(flights: Sequence[Flight], target: Target) -> float | None:
    targets = target.targets
    met = [one.meets(targets.ttft_milliseconds, targets.tpot_milliseconds) for one in flights]
    return sum(met) / len(met) if met else None


def _latency(seconds: Sequence[float | None], percent: int) -> float | None:
    known = [one for one in seconds if one is not None]
    return 1000 * percentile_of(known, percent) if known else None

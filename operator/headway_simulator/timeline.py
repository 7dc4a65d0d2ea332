"""A run minute by minute: load, replicas, limits and latencies, for reports and pictures. Decides nothing."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from headway_operator.slo import Target
from headway_simulator.records import Run
from headway_simulator.trace import percentile_of

BIN_SECONDS = 60.0


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
        met = [
            one.meets(target.targets.ttft_milliseconds, target.targets.tpot_milliseconds) for one in flights
        ]
        minutes.append(
            Minute(
                at_seconds=start - run.starts_at,
                requests_per_second=len(flights) / (end - start),
                wanted=None if last is None else last.replicas,
                ready=None if last is None else last.num_ready,
                max_num_seqs=None if last is None else last.limits.max_num_seqs,
                max_num_batched_tokens=None if last is None else last.limits.max_num_batched_tokens,
                joint_attainment=sum(met) / len(met) if met else None,
                ttft_milliseconds=_latency([one.ttft_seconds for one in flights], target.percentile),
                tpot_milliseconds=_latency([one.tpot_seconds for one in flights], target.percentile),
            )
        )
        start = end
    return minutes


def _latency(seconds: Sequence[float | None], percent: int) -> float | None:
    known = [one for one in seconds if one is not None]
    return 1000 * percentile_of(known, percent) if known else None

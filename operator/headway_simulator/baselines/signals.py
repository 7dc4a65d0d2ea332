"""What baselines look at: the latest sample of each living replica, and what happened between two of them.

A replica whose sample did not come is read as it last was, as Prometheus does for five minutes, where these
autoscalers get their numbers. Decides nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway_operator.samples import ReplicaSample, Sample
from headway_operator.state import Observed

LOOKBACK_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Seen:
    """replicas: the latest sample of each living replica. held: requests that wait at gateways."""

    replicas: Mapping[str, ReplicaSample] = field(default_factory=dict)
    held: int = 0


def see(before: Seen, sample: Sample, observed: Observed, now: float) -> Seen:
    """Bring it up to date with one pass."""
    living = {one.name for one in observed.replicas if one.phase == "ready"}
    latest = {**before.replicas, **{name: one for name, one in sample.replicas.items() if one is not None}}
    replicas = {
        name: one for name, one in latest.items() if name in living and now - one.taken_at <= LOOKBACK_SECONDS
    }
    gateways = list(sample.gateways.values())
    held = before.held if None in gateways else sum(one.waiting for one in gateways if one is not None)
    return Seen(replicas, held)


def num_waiting(seen: Seen) -> int:
    """Requests that no replica has begun."""
    return seen.held + sum(one.waiting for one in seen.replicas.values())


def num_in_flight(seen: Seen) -> int:
    """Requests that have been received and not answered whole: what a proxy counts as concurrency."""
    return num_waiting(seen) + sum(one.running for one in seen.replicas.values())


def kv_use(one: ReplicaSample) -> float:
    return one.kv_blocks_used / one.kv_blocks_total


def busy_share(before: ReplicaSample | None, after: ReplicaSample) -> float | None:
    """The share of time in which a replica ran steps; None without two samples of one engine."""
    if before is None or before.instance != after.instance or before.taken_at >= after.taken_at:
        return None
    milliseconds = after.histograms["step"].sum_milliseconds - before.histograms["step"].sum_milliseconds
    return max(0.0, min(1.0, milliseconds / 1000 / (after.taken_at - before.taken_at)))


def gained(before: Seen, after: Seen, value: Callable[[ReplicaSample], float]) -> float:
    """By how much a total has grown over all replicas; one that is new, or began anew, brings all it has."""
    total = 0.0
    for name, one in after.replicas.items():
        old = before.replicas.get(name)
        total += value(one) - (value(old) if old is not None and old.instance == one.instance else 0.0)
    return total

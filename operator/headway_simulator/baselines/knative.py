"""The Knative Pod Autoscaler: requests in flight per replica, over a stable and a panic window.

Source: Knative Serving's documentation, "Additional autoscaling configuration for Knative Pod Autoscaler",
and its config-autoscaler: stable-window 60 s, panic-window-percentage 10 (6 s), panic-threshold-percentage
200, container-concurrency-target-percentage 70, max-scale-up-rate 1000, max-scale-down-rate 2. It ticks
each TICK_SECONDS, which is what the proof gives it between two passes; elsewhere it acts with each pass.

    desired = ceil(mean requests in flight over the window / target), at most 1000 times and at least half of
    the ready replicas

Panic begins when the panic window asks for twice the ready replicas or more. In panic the greater of both
windows counts and nothing is scaled down; it ends when the stable window has passed without a reason for it.

The target is a share of `containerConcurrency`, which is what a replica runs at once (max_num_seqs): 70% by
default; the share is what there is to tune.
"""

import math
from dataclasses import dataclass, field, replace

from headway_operator.samples import Sample
from headway_operator.slo import Target
from headway_operator.state import Decision, Observed
from headway_simulator.baselines.knowledge import Known, decision
from headway_simulator.baselines.signals import Seen, num_in_flight, see
from headway_simulator.control import Controller

TICK_SECONDS = 2.0
STABLE_WINDOW_SECONDS = 60.0
PANIC_WINDOW_SECONDS = 6.0
PANIC_THRESHOLD = 2.0
MOST_UP_RATE, MOST_DOWN_RATE = 1000.0, 2.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    """target_share: of max_num_seqs, which a replica is to have in flight."""

    target_share: float = 0.7


CANDIDATES = tuple(Concurrency(share) for share in (0.7, 0.25, 0.1, 0.4, 0.15, 0.5, 0.3, 0.2, 0.06, 1.0))


@dataclass(frozen=True, slots=True)
class Memory:
    """past: requests in flight over the stable window. panicked_at: when there was a reason last.

    most: the highest number wanted in this panic.
    """

    seen: Seen = field(default_factory=Seen)
    past: tuple[tuple[float, int], ...] = ()
    panicked_at: float | None = None
    most: int = 0


def by_concurrency(known: Known, parameters: Concurrency) -> Controller[Memory]:
    """`knative-kpa`."""

    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        seen = see(memory.seen, sample, observed, now)
        kept = tuple(one for one in memory.past if now - one[0] < STABLE_WINDOW_SECONDS)
        memory = replace(memory, seen=seen, past=(*kept, (now, num_in_flight(seen))))
        limits = target.initial if known.limits is None else known.limits
        per_replica = parameters.target_share * limits.max_num_seqs
        ready = max(1, sum(one.phase == "ready" for one in observed.replicas))
        stable, panic = (
            _bounded(math.ceil(_mean(memory.past, now - window) / per_replica), ready)
            for window in (STABLE_WINDOW_SECONDS, PANIC_WINDOW_SECONDS)
        )
        replicas, memory = _with_panic(memory, stable, panic, ready, now)
        cause = "Stable" if memory.panicked_at is None else "Panic"
        return decision(known, target, replicas, cause, now), memory

    return Controller("knative-kpa", lambda sample, now: Memory(), decide)


def _with_panic(memory: Memory, stable: int, panic: int, ready: int, now: float) -> tuple[int, Memory]:
    if panic / ready >= PANIC_THRESHOLD:
        memory = replace(memory, panicked_at=now)
    elif memory.panicked_at is not None and now - memory.panicked_at > STABLE_WINDOW_SECONDS:
        memory = replace(memory, panicked_at=None, most=0)
    if memory.panicked_at is None:
        return stable, memory
    most = max(memory.most, stable, panic)
    return most, replace(memory, most=most)


def _mean(past: tuple[tuple[float, int], ...], since: float) -> float:
    values = [number for at, number in past if at > since]
    return sum(values) / len(values)


def _bounded(desired: int, ready: int) -> int:
    return max(math.floor(ready / MOST_DOWN_RATE), min(math.ceil(ready * MOST_UP_RATE), desired))

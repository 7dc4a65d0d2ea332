"""HorizontalPodAutoscaler: on utilisation, and, as KEDA sets one up, on the requests that wait.

Source: Kubernetes documentation, "Horizontal Pod Autoscaling" (algorithm details, configurable scaling
behavior, autoscaling/v2), and KEDA's "Scaling Deployments" and issue 2282 (where values come from).

Every 15 s: desired = ceil(replicas * value / target), and none of it while value / target is within 0.1 of 1.
Utilisation is the mean over ready replicas; those starting, or without a value, count as idle where it says
up and as on target where it says down, and where that turns the direction nothing happens. Waiting requests
are an external metric with an average value: desired = ceil(total / target). KEDA's metrics server reads it
anew at each of these 15 s: pollingInterval (30 s) is of activation between none and one alone, and of a cache
that is off by default (useCachedMetrics). A load here begins with a replica and keeps one.

Behaviour, its defaults: up at once, in 15 s at most by the greater of 100% and 4; down to the highest desired
number of the last 300 s (which is what operators tune, with the target).

Utilisation is the share of time in which the GPU runs steps, over the last 60 s: what a GPU's exporter says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway_operator.samples import ReplicaSample, Sample
from headway_operator.slo import Target
from headway_operator.state import Decision, Observed
from headway_simulator.baselines.knowledge import Known, decision, scaled_to
from headway_simulator.baselines.signals import Seen, busy_share, num_waiting, see
from headway_simulator.control import Controller

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
UP_PERIOD_SECONDS = 15.0
MOST_UP_FACTOR, MOST_UP_PODS = 2.0, 4
UTILISATION_WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Behavior:
    """stabilization_seconds: of scaling down."""

    target: float
    stabilization_seconds: float = 300.0


UTILISATION_CANDIDATES = (
    *(Behavior(target) for target in (0.8, 0.5, 0.3, 0.4, 0.6, 0.7, 0.9)),
    *(Behavior(target, 60.0) for target in (0.7, 0.5, 0.3)),
)
_WINDOWS = (300.0, 0.0, 120.0, 60.0, 600.0, 1200.0)
WAITING_5_CANDIDATES = tuple(Behavior(5.0, window) for window in _WINDOWS)
WAITING_1_CANDIDATES = tuple(Behavior(1.0, window) for window in _WINDOWS)


@dataclass(frozen=True, slots=True)
class Memory:
    """past: what was seen in the last UTILISATION_WINDOW_SECONDS, the newest last.

    desired: what was wanted, and when, over the stabilization time. period: since when replicas may rise by
    so much only, and how many there were then.
    """

    past: tuple[tuple[float, Seen], ...] = ()
    synced_at: float = -math.inf
    desired: tuple[tuple[float, int], ...] = ()
    period: tuple[float, int] = (-math.inf, 0)

    @property
    def seen(self) -> Seen:
        return self.past[-1][1] if self.past else Seen()


Desired = Callable[[Memory, Observed, int], int]


def on_utilisation(known: Known, parameters: Behavior) -> Controller[Memory]:
    """`hpa-utilisation`."""

    def desired(memory: Memory, observed: Observed, replicas: int) -> int:
        shares = {
            name: share
            for name, one in memory.seen.replicas.items()
            if (share := busy_share(_oldest(memory, name), one)) is not None
        }
        num_pods = sum(one.phase != "draining" for one in observed.replicas)
        return by_pods(shares, num_pods, replicas, parameters.target)

    return _controller("hpa-utilisation", known, parameters, desired)


def on_waiting(known: Known, parameters: Behavior) -> Controller[Memory]:
    """`keda-waiting-5` and `keda-waiting-1`."""

    def desired(memory: Memory, observed: Observed, replicas: int) -> int:
        return by_waiting(num_waiting(memory.seen), replicas, parameters.target)

    return _controller(f"keda-waiting-{parameters.target:g}", known, parameters, desired)


def by_waiting(waiting: int, replicas: int, target: float) -> int:
    """The replicas that so many waiting requests ask for, `target` for each."""
    if abs(waiting / (target * max(1, replicas)) - 1) <= TOLERANCE:
        return replicas
    return math.ceil(waiting / target)


def by_pods(values: dict[str, float], num_pods: int, replicas: int, target: float) -> int:
    """The replicas that a mean value over pods asks for; `num_pods` are there, with or without a value."""
    if not values:
        return replicas
    ratio = sum(values.values()) / len(values) / target
    missing = num_pods - len(values)
    if abs(ratio - 1) <= TOLERANCE:
        return replicas
    if missing == 0:
        return math.ceil(ratio * len(values))
    filled = sum(values.values()) + (target * missing if ratio < 1 else 0.0)
    again = filled / num_pods / target
    if abs(again - 1) <= TOLERANCE or (again > 1) != (ratio > 1):
        return replicas
    wanted = math.ceil(again * num_pods)
    return replicas if (wanted > replicas) != (ratio > 1) else wanted


def _controller(name: str, known: Known, parameters: Behavior, desired: Desired) -> Controller[Memory]:
    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        memory = _looked(memory, sample, observed, now)
        replicas = scaled_to(observed)
        if now - memory.synced_at < SYNC_SECONDS:
            return decision(known, target, replicas, "BetweenSyncs", now), memory
        wanted = target.bound_replicas(desired(memory, observed, replicas))
        chosen, memory = behave(memory, wanted, replicas, parameters.stabilization_seconds, now)
        return decision(known, target, chosen, "Synced", now), memory

    return Controller(name, lambda sample, now: Memory(), decide)


def behave(
    memory: Memory, wanted: int, replicas: int, stabilization_seconds: float, now: float
) -> tuple[int, Memory]:
    """What scaling behaviour makes of a wanted number; the memory of a sync that is done."""
    recommended = (*(one for one in memory.desired if now - one[0] < stabilization_seconds), (now, wanted))
    chosen = wanted
    if wanted < replicas:
        chosen = min(replicas, max(number for _, number in recommended))
    period = memory.period if now - memory.period[0] < UP_PERIOD_SECONDS else (now, replicas)
    chosen = min(chosen, max(int(MOST_UP_FACTOR * period[1]), period[1] + MOST_UP_PODS))
    return chosen, replace(memory, synced_at=now, desired=recommended, period=period)


def _looked(memory: Memory, sample: Sample, observed: Observed, now: float) -> Memory:
    seen = see(memory.seen, sample, observed, now)
    kept = tuple(one for one in memory.past if now - one[0] <= UTILISATION_WINDOW_SECONDS)
    return replace(memory, past=(*kept, (now, seen)))


def _oldest(memory: Memory, name: str) -> ReplicaSample | None:
    return next((seen.replicas[name] for _, seen in memory.past if name in seen.replicas), None)

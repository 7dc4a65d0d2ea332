"""Saturation-based scaling, as llm-d's Workload Variant Autoscaler does it with one variant.

Source: llm-d-workload-variant-autoscaler, docs/saturation-analyzer.md: each minute, with the peaks of the
last minute of each replica's KV use and queue. A replica is saturated from kvCacheThreshold (0.8) or
queueLengthThreshold (5) on. Of those that are not, the mean spare is threshold - peak. Below kvSpareTrigger
(0.1) or queueSpareTrigger (3) of spare: one replica more, unless one is pending. One fewer where the load
of the unsaturated, spread over one fewer, would leave at least both triggers. With none unsaturated there
is no spare: one more.

What it wants is carried out by a HorizontalPodAutoscaler with its default behaviour, 300 s of stabilization
before scaling down, as its guide sets it up.
"""

import math
from dataclasses import dataclass, field, replace

from headway_operator.samples import Sample
from headway_operator.slo import Target
from headway_operator.state import Decision, Observed
from headway_simulator.baselines import horizontal
from headway_simulator.baselines.knowledge import Known, decision, scaled_to
from headway_simulator.baselines.signals import Seen, kv_use, see
from headway_simulator.control import Controller

INTERVAL_SECONDS = 60.0
SYNC_SECONDS = horizontal.SYNC_SECONDS
STABILIZATION_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Its ConfigMap's."""

    kv_cache_threshold: float = 0.8
    queue_length_threshold: float = 5.0
    kv_spare_trigger: float = 0.1
    queue_spare_trigger: float = 3.0


CANDIDATES = (
    Thresholds(),
    *(Thresholds(kv, 2.0, spare, 1.5) for kv, spare in ((0.3, 0.05), (0.1, 0.03))),
    *(Thresholds(kv, 5.0, spare, 3.0) for kv, spare in ((0.5, 0.1), (0.3, 0.1), (0.2, 0.05), (0.1, 0.03))),
    *(Thresholds(0.8, queue, 0.1, spare) for queue, spare in ((3.0, 2.0), (2.0, 1.5), (10.0, 3.0))),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """peaks: of the minute under way, KV use and queue by replica. wanted: what the analysis last said."""

    seen: Seen = field(default_factory=Seen)
    peaks: tuple[tuple[str, float, int], ...] = ()
    analysed_at: float = -math.inf
    wanted: int | None = None
    scaler: horizontal.Memory = field(default_factory=horizontal.Memory)


def by_saturation(known: Known, parameters: Thresholds) -> Controller[Memory]:
    """`wva-saturation`."""

    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        seen = see(memory.seen, sample, observed, now)
        memory = replace(memory, seen=seen, peaks=_peaks(memory, seen))
        replicas = scaled_to(observed)
        if now - memory.analysed_at >= INTERVAL_SECONDS and memory.peaks:
            num_pending = sum(one.phase in ("pending", "starting") for one in observed.replicas)
            wanted = analysed([one[1:] for one in memory.peaks], replicas, num_pending, parameters)
            memory = replace(memory, analysed_at=now, wanted=wanted, peaks=())
        if memory.wanted is None or now - memory.scaler.synced_at < SYNC_SECONDS:
            return decision(known, target, replicas, "BetweenSyncs", now), memory
        chosen, scaler = horizontal.behave(
            memory.scaler, target.bound_replicas(memory.wanted), replicas, STABILIZATION_SECONDS, now
        )
        return decision(known, target, chosen, "Synced", now), replace(memory, scaler=scaler)

    return Controller("wva-saturation", lambda sample, now: Memory(), decide)


def analysed(peaks: list[tuple[float, int]], replicas: int, num_pending: int, parameters: Thresholds) -> int:
    """The replicas wanted, of KV use and queue of each."""
    spare = [
        (parameters.kv_cache_threshold - kv, parameters.queue_length_threshold - queue)
        for kv, queue in peaks
        if kv < parameters.kv_cache_threshold and queue < parameters.queue_length_threshold
    ]
    count = len(spare)
    spare_kv, spare_queue = (sum(one[index] for one in spare) / max(1, count) for index in (0, 1))
    if spare_kv < parameters.kv_spare_trigger or spare_queue < parameters.queue_spare_trigger:
        return replicas if num_pending else replicas + 1
    if count < 2:
        return replicas
    left_kv, left_queue = (
        threshold - (threshold - spared) * count / (count - 1)
        for threshold, spared in (
            (parameters.kv_cache_threshold, spare_kv),
            (parameters.queue_length_threshold, spare_queue),
        )
    )
    is_safe = left_kv >= parameters.kv_spare_trigger and left_queue >= parameters.queue_spare_trigger
    return replicas - 1 if is_safe else replicas


def _peaks(memory: Memory, seen: Seen) -> tuple[tuple[str, float, int], ...]:
    before = {name: (kv, queue) for name, kv, queue in memory.peaks}
    return tuple(
        (
            name,
            max(before.get(name, (0.0, 0))[0], kv_use(one)),
            max(before.get(name, (0.0, 0))[1], one.waiting),
        )
        for name, one in seen.replicas.items()
    )

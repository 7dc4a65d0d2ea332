"""A controller as the simulator drives it, and the operator's eyes and hands: samples, observations, plans.

The controller is `decide` of the operator, or any pure function of the same signature over a memory of its
own. What it decides goes through the operator's own `plan`. Nothing here decides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from headway_operator.samples import LATENCY_EDGES, Histogram, Limits, Moments, ReplicaSample, Sample, Targets
from headway_operator.slo import Memory, Target, decide, resume
from headway_operator.spec import Service
from headway_operator.state import Decision, Gateway, Observed, Plan, Rendered, Revision, RevisionPin
from headway_runtime.histograms import EDGES_MILLISECONDS, HistogramSnapshot
from headway_simulator.engine import SimulatedEngine
from headway_simulator.pods import Pod

AnyMemory = TypeVar("AnyMemory")
# The operator's own object where they are the same, as in a sample that came over the wire.
EDGES = LATENCY_EDGES if EDGES_MILLISECONDS == LATENCY_EDGES else EDGES_MILLISECONDS

HISTOGRAMS = ("ttft", "queue", "prefill", "tpot", "step")
REVISION_HASH = "simulated"
GATEWAY_ADDRESS = "http://gateway"


@dataclass(frozen=True, slots=True)
class Controller(Generic[AnyMemory]):
    """begin: the memory of an operator that starts. decide: as `headway_operator.slo.decide`."""

    name: str
    begin: Callable[[Sample, float], AnyMemory]
    decide: Callable[[Target, AnyMemory, Sample, Observed, float], tuple[Decision, AnyMemory]]


def headway() -> Controller[Memory]:
    """The controller that ships."""
    return Controller("headway", lambda sample, now: resume(None, sample, now), decide)


def observed(service: Service, replicas: int, pods: Iterable[Pod], created_at: float) -> Observed:
    """What the cluster says of one Deployment and its pods."""
    revision = Revision(f"{service.name}-{REVISION_HASH}", REVISION_HASH, replicas, created_at)
    return Observed(
        revisions=(revision,),
        replicas=tuple(pod.as_replica(REVISION_HASH) for pod in pods),
        gateway=Gateway(ready=True, addresses=(GATEWAY_ADDRESS,)),
    )


def rendered(service: Service) -> Rendered:
    """One revision, applied long ago."""
    name = f"{service.name}-{REVISION_HASH}"
    return Rendered(RevisionPin(name, REVISION_HASH, "", "", "", ""), manifests=(), keep=frozenset())


def scale_of(todo: Plan, service: Service) -> int | None:
    """To how many replicas a plan scales the one revision; None where it leaves them."""
    return todo.scale.get(f"{service.name}-{REVISION_HASH}")


def replica_sample(pod: Pod, engine: SimulatedEngine, envelope: Limits, now: float) -> ReplicaSample:
    """A replica's `/admin/sample` as the operator reads it, with the runtime's own buckets."""
    engine.catch_up(now)
    metrics = engine.metrics.snapshot()
    limits, gaps = engine.scheduler.limits, metrics.histograms["inter_token"]
    return ReplicaSample(
        instance=pod.name,
        taken_at=now,
        limits=Limits(limits.max_num_seqs, limits.max_num_batched_tokens),
        envelope=envelope,
        targets=Targets(metrics.targets.ttft_milliseconds, metrics.targets.tpot_milliseconds),
        judges_end_to_end=False,
        running=engine.num_running,
        waiting=engine.num_waiting,
        oldest_waiting_seconds=engine.oldest_waiting_seconds(now),
        kv_blocks_used=engine.scheduler.pool.num_used,
        kv_blocks_total=engine.scheduler.pool.num_blocks,
        draining=pod.phase == "draining",
        counters=metrics.counters,
        histograms={name: _histogram(metrics.histograms[name]) for name in HISTOGRAMS},
        moments=Moments(
            metrics.moments.decode_steps,
            metrics.moments.prompt_steps,
            metrics.moments.prompts,
            metrics.moments.answers,
            (sum(gaps.counts), engine.step_time_error * gaps.sum_milliseconds),
        ),
    )


def _histogram(one: HistogramSnapshot) -> Histogram:
    return Histogram(EDGES, one.counts, sum(one.counts), one.sum_milliseconds)

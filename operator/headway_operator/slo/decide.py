"""decide(): one pass of the controller."""

from headway_operator.slo.memory import Memory
from headway_operator.slo.target import Target
from headway_operator.state import Attainment, Decision, Observed, Sample


def decide(
    target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
) -> tuple[Decision, Memory]:
    """Choose replicas and limits."""
    nothing = Attainment(None, None, 0, 0, "unknown")
    decision = Decision(
        at=now,
        replicas=target.bound_replicas(len(sample.replicas)),
        limits=target.bound_limits(target.initial),
        cause="Holding",
        message=f"holding {len(observed.replicas)} replicas",
        blocker="",
        ttft=nothing,
        tpot=nothing,
        evidence={},
    )
    return decision, memory

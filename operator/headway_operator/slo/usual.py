"""What requests usually bring, beside what they have brought in the last minutes.

Prompts and answers grow longer and shorter within minutes, and with them what a replica can do: by a half
within five minutes in the Azure trace, there and back. Replicas that are few enough for a light spell are too
few after it. So what a removal leaves is held against the mean of a longer time as well, by the time of a
device that it takes. How much prompts differ, or how much of a KV cache is held, is not compared.
"""

from dataclasses import dataclass, fields, replace

from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Workload

USUAL_SECONDS = 600.0
# No more than this counts for the time between two passes.
MOST_SECONDS = 60.0
_NAMES = tuple(one.name for one in fields(Workload))


@dataclass(frozen=True, slots=True)
class Usual:
    """workload: the mean over the time in which requests came, of the last USUAL_SECONDS of it above all.
    seconds: of such time, all together. at: of the last pass in it."""

    workload: Workload
    seconds: float
    at: float


def with_latest(usual: Usual | None, work: Workload, now: float) -> Usual:
    """The mean with what requests bring now."""
    if usual is None:
        return Usual(work, 0.0, now)
    passed = min(MOST_SECONDS, now - usual.at)
    if passed <= 0.0:
        return replace(usual, at=now)
    seconds = usual.seconds + passed
    share = passed / min(USUAL_SECONDS, seconds)
    known = [getattr(usual.workload, name) for name in _NAMES]
    latest = [getattr(work, name) for name in _NAMES]
    pairs = zip(known, latest, strict=True)
    return Usual(Workload(*(before + share * (new - before) for before, new in pairs)), seconds, now)


def drift(usual: Usual | None, replica: Replica) -> float | None:
    """How much more work a request usually brings than one does now, over what this brings; 0 where it brings
    less. None before it is known for USUAL_SECONDS."""
    if usual is None or usual.seconds < USUAL_SECONDS:
        return None
    then = replace(replica, workload=usual.workload)
    return max(0.0, replica.most_per_second / then.most_per_second - 1.0)

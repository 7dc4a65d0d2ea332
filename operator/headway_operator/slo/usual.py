"""What requests usually bring, beside what they have brought in the last minutes.

Prompts and answers grow longer and shorter within minutes, and with them what a replica can do: by a half
within five minutes in the Azure trace, there and back. Replicas that are few enough for a light spell are too
few after it. So what a removal leaves is held against the mean of a longer time as well.
"""

from dataclasses import astuple, dataclass, replace

from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Workload

USUAL_SECONDS = 600.0
# No more than this counts for the time between two passes.
MOST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Usual:
    """workload: the mean over time of what requests brought, of the last USUAL_SECONDS above all, or of all
    since then where that is shorter. at: of the last pass that knew any."""

    workload: Workload
    since: float
    at: float


def with_latest(usual: Usual | None, work: Workload, now: float) -> Usual:
    """The mean with one more pass."""
    if usual is None:
        return Usual(work, now, now)
    passed = min(MOST_SECONDS, max(0.0, now - usual.at))
    share = passed / max(1.0, passed, min(USUAL_SECONDS, now - usual.since))
    pairs = zip(astuple(usual.workload), astuple(work), strict=True)
    return Usual(Workload(*(before + share * (new - before) for before, new in pairs)), usual.since, now)


def drift(usual: Usual | None, replica: Replica, now: float) -> float | None:
    """How much more work a request usually brings than one does now, over what this brings; 0 where it brings
    less. None before it is known for USUAL_SECONDS."""
    if usual is None or now - usual.since < USUAL_SECONDS:
        return None
    then = replace(replica, workload=usual.workload)
    return max(0.0, replica.most_per_second / then.most_per_second - 1.0)

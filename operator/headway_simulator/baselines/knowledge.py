"""What a baseline is told before it runs, and the form in which all of them decide."""

from dataclasses import dataclass

from headway_operator.samples import Limits
from headway_operator.slo import Target
from headway_operator.state import Attainment, Decision, Observed
from headway_simulator.step_model import StepModel

UNKNOWN = Attainment(None, None, 0, 0, "unknown")


@dataclass(frozen=True, slots=True)
class Known:
    """profile: of one replica, as measured before it is deployed; right or wrong.

    mean_replicas, peak_replicas: what the work of a known load needs on average and in its busiest minute.
    limits: batch limits, which no baseline moves; None leaves them as the service begins.
    """

    profile: StepModel
    mean_replicas: float
    peak_replicas: float
    limits: Limits | None = None


def decision(known: Known, target: Target, replicas: int, cause: str, now: float) -> Decision:
    """So many replicas, within bounds, with batch limits that stay."""
    limits = target.initial if known.limits is None else known.limits
    return Decision(now, target.bound_replicas(replicas), limits, cause, "", "", UNKNOWN, UNKNOWN, {})


def scaled_to(observed: Observed) -> int:
    """To how many replicas the Deployment is scaled."""
    return max((one.replicas for one in observed.revisions), default=0)

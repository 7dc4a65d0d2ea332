"""A fixed number of replicas: `static-mean` for the load's mean, `static-peak` for its busiest minute.

Capacity planning without an autoscaler: what the load's work needs in device time, at 70% of it, times a
factor, which is what there is to tune.
"""

import math
from dataclasses import dataclass
from typing import Literal

from headway_operator.samples import Sample
from headway_operator.slo import Target
from headway_operator.state import Decision, Observed
from headway_simulator.baselines.knowledge import Known, decision
from headway_simulator.control import Controller


@dataclass(frozen=True, slots=True)
class Static:
    """factor: on what the mean, or the busiest minute, needs."""

    of: Literal["mean", "peak"]
    factor: float = 1.0


# Of the mean even twice as much may be too little; of the busiest minute a part may be enough.
_OF_MEAN = (1.0, 2.0, 1.4, 0.7, 1.2, 1.7, 0.85, 1.1, 1.55, 0.9)
_OF_PEAK = (1.0, 0.7, 1.6, 2.0, 1.3, 0.85, 1.15, 0.9, 1.8, 1.45)
MEAN_CANDIDATES = tuple(Static("mean", factor) for factor in _OF_MEAN)
PEAK_CANDIDATES = tuple(Static("peak", factor) for factor in _OF_PEAK)


def fixed(known: Known, parameters: Static) -> Controller[None]:
    """The controller."""
    needed = known.mean_replicas if parameters.of == "mean" else known.peak_replicas
    replicas = math.ceil(needed * parameters.factor)

    def decide(
        target: Target, memory: None, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, None]:
        return decision(known, target, replicas, "Fixed", now), None

    return Controller(f"static-{parameters.of}", lambda sample, now: None, decide)

"""Other autoscalers' algorithms behind the simulator's `Controller`, to be compared with the one that ships.

Each follows its project's documentation (named in its file), with the defaults written there, as a function
of what is observed over a memory of its own; each has at most MOST_CANDIDATES settings to choose from, the
default first, then two that span what the rest lie between: so that the first three find what all would, but
for its last part. None moves batch limits: none
of these projects does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway_simulator.baselines.horizontal import (
    UTILISATION_CANDIDATES,
    WAITING_1_CANDIDATES,
    WAITING_5_CANDIDATES,
    on_utilisation,
    on_waiting,
)
from headway_simulator.baselines.knative import CANDIDATES as KNATIVE_CANDIDATES
from headway_simulator.baselines.knative import TICK_SECONDS, by_concurrency
from headway_simulator.baselines.knowledge import Known
from headway_simulator.baselines.planner import CANDIDATES as PLANNER_CANDIDATES
from headway_simulator.baselines.planner import by_profile
from headway_simulator.baselines.saturation import CANDIDATES as SATURATION_CANDIDATES
from headway_simulator.baselines.saturation import by_saturation
from headway_simulator.baselines.static import MEAN_CANDIDATES, PEAK_CANDIDATES, fixed
from headway_simulator.control import Controller

MOST_CANDIDATES = 10


@dataclass(frozen=True, slots=True)
class Baseline:
    """candidates: its settings, the documented default first.

    make: the controller, of what is known and one of the candidates. interval_seconds: between two of its
    looks, where that is less than the time between two passes.
    """

    name: str
    candidates: tuple[Any, ...]
    make: Callable[[Known, Any], Controller[Any]]
    interval_seconds: float | None = None


BASELINES: Mapping[str, Baseline] = {
    one.name: one
    for one in (
        Baseline("static-mean", MEAN_CANDIDATES, fixed),
        Baseline("static-peak", PEAK_CANDIDATES, fixed),
        Baseline("hpa-utilisation", UTILISATION_CANDIDATES, on_utilisation),
        Baseline("keda-waiting-5", WAITING_5_CANDIDATES, on_waiting),
        Baseline("keda-waiting-1", WAITING_1_CANDIDATES, on_waiting),
        Baseline("knative-kpa", KNATIVE_CANDIDATES, by_concurrency, TICK_SECONDS),
        Baseline("wva-saturation", SATURATION_CANDIDATES, by_saturation),
        Baseline("dynamo-planner", PLANNER_CANDIDATES, by_profile),
    )
}

__all__ = ["BASELINES", "MOST_CANDIDATES", "Baseline", "Known"]

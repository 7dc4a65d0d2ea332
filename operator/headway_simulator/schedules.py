"""A schedule: how many replicas serve in each interval; who carries it out, and what it asks for when.

Replicas asked for are ready a cold start later, so at each moment as many are asked for as the interval under
way and all those need that begin within a cold start and two passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway_operator.samples import Limits, Sample
from headway_operator.slo import Target
from headway_operator.state import Attainment, Decision, Observed
from headway_simulator.cluster import BEGIN_SECONDS, Conditions
from headway_simulator.control import Controller

INTERVAL_SECONDS = 60.0
# What only a warm-up needs is let go so long before its end, and has drained when it is paid for.
DRAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """seconds: before the first interval of a schedule begins. replicas: that serve meanwhile, at least."""

    seconds: float = 0.0
    replicas: int = 0


def ahead_seconds(conditions: Conditions) -> float:
    """How long before it begins an interval's replicas are asked for."""
    return conditions.cold_start_seconds + 2 * conditions.interval_seconds


def schedule(
    course: Sequence[int], limits: Limits, conditions: Conditions, before: WarmUp | None = None
) -> Controller[None]:
    """A controller that knows its course, and asks for replicas so early that they are ready in time."""
    unknown = Attainment(None, None, 0, 0, "unknown")
    ahead = ahead_seconds(conditions)
    before = before or WarmUp()
    begin = BEGIN_SECONDS + before.seconds

    def decide(
        target: Target, memory: None, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, None]:
        first = max(0, math.floor((now - begin) / INTERVAL_SECONDS))
        last = math.floor((now - begin + ahead) / INTERVAL_SECONDS)
        within = course[min(first, len(course) - 1) : max(last + 1, 0)]
        least = before.replicas if now < begin - DRAIN_SECONDS else 0
        replicas = target.bound_replicas(max(least, *(within or course[:1])))
        decision = Decision(now, replicas, limits, "Scheduled", "as known before", "", unknown, unknown, {})
        return decision, None

    return Controller("oracle", lambda sample, now: None, decide)


def asked_seconds(course: Sequence[int], ahead: float) -> float:
    """Replica time that a schedule asks for, `ahead` seconds early: its cost but for draining."""
    whole, rest = divmod(ahead, INTERVAL_SECONDS)
    reach = int(whole) + 1
    return sum(
        (INTERVAL_SECONDS - rest) * max(course[index : index + reach])
        + rest * max(course[index : index + reach + 1])
        for index in range(len(course))
    )

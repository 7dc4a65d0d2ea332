"""What the operator says about a service: conditions, status, events. Pure; writes nothing."""

from headway_operator.conditions.events import Event, events
from headway_operator.conditions.lack import Lack
from headway_operator.conditions.problems import Problems
from headway_operator.conditions.startup import longest_start_seconds
from headway_operator.conditions.status import faulted, refused, standing, status, worth_writing

__all__ = [
    "Event",
    "Lack",
    "Problems",
    "events",
    "faulted",
    "longest_start_seconds",
    "refused",
    "standing",
    "status",
    "worth_writing",
]

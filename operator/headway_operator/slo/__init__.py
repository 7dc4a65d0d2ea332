"""The controller: from samples to a `Decision`, with its memory handed in and out. No I/O, no clock."""

from headway_operator.slo.decide import decide
from headway_operator.slo.memory import Memory
from headway_operator.slo.resume import resume
from headway_operator.slo.target import Target, target_of

__all__ = ["Memory", "Target", "decide", "resume", "target_of"]

"""One revision takes the place of another: by room, by share, or not at all. Pure.

`record` is what status remembers, `evidence` what was counted of both revisions since a step of a canary
began, `canary` judges by it, `steps` follows a canary step by step, `follow` decides how far a rollout may go
and when it is given up.
"""

from headway_operator.rollout.evidence import CanaryEvidence
from headway_operator.rollout.facts import Rollout
from headway_operator.rollout.follow import follow
from headway_operator.rollout.record import Record, as_status

__all__ = ["CanaryEvidence", "Record", "Rollout", "as_status", "follow"]

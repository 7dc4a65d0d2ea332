"""The controller: from samples to a `Decision`, with its memory handed in and out. No I/O, no clock.

Causes of a Decision that changes something: RaisedBatchLimit, RaisedTokenBudget, LoweredBatchLimit,
LoweredTokenBudget, AddedReplicas, RemovedReplica, BoundsChanged, Idle, Woken, Suspended, Resumed. Causes of
one that holds: Steady, Stabilizing, Settling, Recovering, Watching, WaitingForReplicas,
HoldingWithoutSamples, ScaledToZero, Asleep, NoTarget, or the blocker. Blockers: FixedReplicas, OtherScaler,
SamplesMissing, AtMaxReplicas, ReplicaPending, Settling, TargetInfeasible, GatewayCannotWake, Suspended,
PendingPastDeadline or the reason of the replica that is past it.
"""

from headway_operator.slo.decide import decide
from headway_operator.slo.end_to_end import with_end_to_end
from headway_operator.slo.memory import Memory
from headway_operator.slo.resume import resume
from headway_operator.slo.target import Target, target_of

__all__ = ["Memory", "Target", "decide", "resume", "target_of", "with_end_to_end"]

"""Everything one decision is taken from: what is promised, measured, wanted and supplied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway_operator.samples import Limits, Sample
from headway_operator.slo.evidence import RECENT_SECONDS, Load, sampled_replicas
from headway_operator.slo.forecast import Forecast
from headway_operator.slo.memory import Memory
from headway_operator.slo.sizing import Sizing, lead_seconds
from headway_operator.slo.target import Target
from headway_operator.slo.window import LONGEST_GAP_SECONDS, Recent, is_unseen
from headway_operator.state import Attainment, Observed, Replica, is_unplaced

# A replica that is not ready so long after it was asked for counts as absent: more may be asked for. Where
# starts take long, it has so many start-up times instead, but an hour at most.
PENDING_DEADLINE_SECONDS, PENDING_STARTS, MOST_PENDING_SECONDS = 600.0, 2.0, 3600.0
# Time for a new replica to take its share of the load before anything is concluded from what is measured.
REPLICA_SETTLE_SECONDS = 10.0
# Time for new limits to show.
LIMITS_SETTLE_SECONDS = 5.0
# A queue that will be gone within this time needs no further help.
RECOVERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Supply:
    """Replicas as they are. desired: what was last asked for, within today's bounds.

    pending: asked for and not ready, not past the deadline. overdue: past it. Both with the cause of one of
    them, or "". unplaced: those pending for which no place is found. replaceable: those overdue whose place
    another one might take (see `_replaceable`).
    unsampled: ready but without a usable sample, for which sample_error is one reason. is_gateway_sampled: no
    gateway kept its sample to itself. is_gateway_lost: one has done so for long. newest_ready_at: when the
    last one became ready. can_be_woken: every gateway holds requests for a service without replicas, and says
    so.
    """

    desired: int
    ready: int
    pending: int
    pending_reason: str
    unplaced: int
    overdue: int
    overdue_reason: str
    replaceable: int
    unsampled: int
    sample_error: str
    is_gateway_sampled: bool
    is_gateway_lost: bool
    existing: int
    newest_ready_at: float
    can_be_woken: bool


class Situation(NamedTuple):
    """What the rules look at. recent: what happened, of the memory's slices. ttft, tpot: on evidence since
    the last change took effect.

    last_ttft_milliseconds, last_tpot_milliseconds: measured at the percentile over the last minutes, whatever
    changed meanwhile. sizing: what a replica is worth; None while that is not known. forecast: of the load.
    lead_seconds: until replicas asked for now are ready. infeasible: why no number of them would do, or "".
    sick: which replicas alone break the promise, or "".
    """

    target: Target
    memory: Memory
    recent: Recent
    supply: Supply
    load: Load
    limits: Limits
    ttft: Attainment
    tpot: Attainment
    last_ttft_milliseconds: float | None
    last_tpot_milliseconds: float | None
    other_scaler: str
    now: float
    forecast: Forecast
    lead_seconds: float
    sizing: Sizing | None = None
    infeasible: str = ""
    sick: str = ""

    @property
    def is_violated(self) -> bool:
        """Whether a promise is broken now."""
        return self.is_ttft_bad or self.is_tpot_bad

    @property
    def is_crowded(self) -> bool:
        """Whether more are late than may be of all that came within the TTFT target, or just now."""
        return self.load.late > self._num_allowed(self._longest_seconds)

    @property
    def is_behind(self) -> bool:
        """Whether somebody is late; of a TTFT target that is longer than what counts as just now, more than
        may be of those that came within it before. For a short one few are late at any moment, however many
        are in the end."""
        allowed = self._num_allowed(self._longest_seconds) - self._num_allowed(RECENT_SECONDS)
        return self.load.late > allowed

    @property
    def _longest_seconds(self) -> float:
        return max(RECENT_SECONDS, self.target.patience_seconds)

    def _num_allowed(self, seconds: float) -> float:
        """How many of all that came in these last seconds may be late."""
        received = self.recent.totals(self.now - seconds, least=1).get("received", 0.0)
        return (1.0 - self.target.percentile / 100.0) * received

    @property
    def is_whole(self) -> bool:
        """Whether all that may come to serve is there, and tells how it is."""
        supply = self.supply
        return (
            supply.ready + supply.unplaced + supply.overdue == supply.existing <= supply.desired
            and supply.pending == supply.unplaced
            and not supply.unsampled
            and supply.is_gateway_sampled
            and not self.load.late
        )

    @property
    def is_settling(self) -> bool:
        """Whether the last change of limits has not acted yet."""
        changed_at = self.memory.limits_changed_at
        return changed_at is not None and self.now - changed_at < LIMITS_SETTLE_SECONDS

    @property
    def is_ttft_bad(self) -> bool:
        """Violated, and still being missed; without a TTFT target, a queue that does not move counts."""
        if self.ttft.target_milliseconds is None:
            return self.load.oldest_waiting_seconds > RECENT_QUEUE_SECONDS
        return self.ttft.verdict == "violated" and (self.load.late > 0 or self.load.ttft_missed > 0)

    @property
    def is_tpot_bad(self) -> bool:
        """Violated, and still being missed."""
        return self.tpot.verdict == "violated" and self.load.tpot_missed > 0

    @property
    def tpot_slack(self) -> float | None:
        """How far the measured TPOT stays below its target, as a share of it; None while unmeasured."""
        target, measured = self.tpot.target_milliseconds, self.tpot.p_milliseconds
        measured = self.last_tpot_milliseconds if measured is None else measured
        if target is None:
            return 1.0
        return None if measured is None else 1.0 - measured / target

    @property
    def is_full(self) -> bool:
        """Where requests wait, all places are taken; where none wait, nearly all."""
        if self.load.num_queues:
            return self.load.num_queues_with_room == 0
        return self.load.running >= 0.9 * self.limits.max_num_seqs * max(1, self.load.num_sampled)

    @property
    def is_queue_dominated(self) -> bool:
        """Requests wait for longer than their prompts take to compute."""
        return self.load.late > 0 or self.load.queue_milliseconds > self.load.prefill_milliseconds

    @property
    def is_recovering(self) -> bool:
        """The queue will soon be gone, or is gone already and what was missed is past."""
        if self.load.waiting == 0 and not self.is_full and self.is_queue_dominated:
            return True
        memory = self.memory
        if memory.backlog_at is None or self.now <= memory.backlog_at or self.load.waiting >= memory.backlog:
            return False
        per_second = (memory.backlog - self.load.waiting) / (self.now - memory.backlog_at)
        return self.load.waiting / per_second <= RECOVERY_SECONDS


# Without a TTFT target somebody must still say when a queue is too old.
RECENT_QUEUE_SECONDS = 10.0


def supply(target: Target, memory: Memory, sample: Sample, observed: Observed, now: float) -> Supply:
    """Count the replicas."""
    desired = wanted_so_far(target, memory, observed)
    living = [replica for replica in observed.replicas if replica.phase != "draining"]
    ready = [replica for replica in living if replica.phase == "ready"]
    unready = [replica for replica in living if replica.phase != "ready"]
    starts = min(MOST_PENDING_SECONDS, PENDING_STARTS * lead_seconds(memory))
    deadline = max(PENDING_DEADLINE_SECONDS, starts)
    late = [replica for replica in unready if replica.created_at + deadline <= now]
    fresh = sampled_replicas(sample)
    asked_at = memory.replicas_raised_at
    # Pods that were asked for and do not exist yet are pending too, for as long as any other.
    is_asked_lately = asked_at is not None and asked_at + deadline > now
    unborn = max(0, desired - len(living)) if is_asked_lately else 0
    return Supply(
        desired=desired,
        ready=len(ready),
        pending=len(unready) - len(late) + unborn,
        pending_reason=next((r.reason for r in unready if r.reason and r not in late), ""),
        unplaced=sum(is_unplaced(one) for one in unready) - sum(map(is_unplaced, late)),
        overdue=len(late),
        overdue_reason=next((replica.reason for replica in late if replica.reason), ""),
        replaceable=_replaceable(late, deadline),
        unsampled=sum(replica.name not in fresh for replica in ready),
        sample_error=next((why for name, why in sample.errors.items() if name in sample.replicas), ""),
        is_gateway_sampled=None not in sample.gateways.values(),
        is_gateway_lost=any(
            one is None and is_unseen(name, memory.baselines, now - LONGEST_GAP_SECONDS)
            for name, one in sample.gateways.items()
        ),
        existing=len(living),
        newest_ready_at=max((r.ready_at for r in ready if r.ready_at is not None), default=0.0),
        can_be_woken=bool(sample.gateways)
        and all(one is not None and one.routing is not None for one in sample.gateways.values()),
    )


def _replaceable(late: Sequence[Replica], deadline: float) -> int:
    """Of replicas past their deadline, those for which one more is asked.

    Not for one without a place, since another would find none either; nor for one made after the first of
    these was past its deadline, since it may have been asked for in that one's stead: else substitutes of
    substitutes would come up to the largest number allowed.
    """
    placed = [one.created_at for one in late if not is_unplaced(one)]
    return sum(at < min(placed) + deadline for at in placed)


def wanted_so_far(target: Target, memory: Memory, observed: Observed) -> int:
    """What was last asked for: remembered, else read from what exists, within today's bounds."""
    existing = max((revision.replicas for revision in observed.revisions), default=0)
    if observed.other_scaler and target.fixed_replicas is None:
        return existing
    if memory.parked_replicas is not None:  # suspended, or resumed just now
        return target.bound_replicas(memory.parked_replicas)
    if memory.replicas is not None:
        return target.bound_replicas(memory.replicas)
    # A new service shows that it can serve before it may sleep.
    return target.bound_replicas(existing if observed.revisions else 1)

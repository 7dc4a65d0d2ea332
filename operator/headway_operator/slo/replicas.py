"""The number of replicas: what is recommended, what of it is done now, and what forbids it.

Recommended is the largest of

    feed-forward  (rate ahead + BURST_DEVIATIONS * sqrt(IDC * rate / window)) / (kappa * capacity)
    backlog       (rate + queue that will be left / drain time) / (kappa * capacity)
    standing      those that there are + queue that will be left / drain time / (kappa * capacity), where a
                  queue stands (`crowd`)

with the rate forecast for when replicas asked for now are ready, and no less than that of now while a promise
is broken. The window in which a burst is to be served is the start-up time (30 s at least) and, since all of
it may wait that long, the TTFT target. A queue is looked at while more requests are late than may be, or some
are and TTFT is broken, and is to be drained within DRAIN_SECONDS, or as long as requests may wait if that is
longer.

The more replicas share a rate, the less of a group comes to each (`capacity`); so where more than one more is
called for by what one of those that there are can do, the fewest are that could take the rate together.

Below what there is, a dead band holds: fewer are recommended only if they could take DEAD_BAND more, and the
load as it is within MOST_USE of the targets, which are not known better than that. It is a share of the rate
above all: under a target close to the latency of an idle replica, a tenth of that is a third of what a
replica can do. Where requests usually bring more work than now (`usual`), by a larger share than the band,
the band is that share. Above what there is, none is added for a rate that is no more than MOST_OVER higher
than replicas are trusted with, while no more are late than may be, no promise is broken and no rise
foretold: one that goes up and down with noise would be started in vain.

Up at once: at most MOST_ADDED per decision, and no more than doubled, or FEW_ADDED if that is more. What is
pending counts as there until its deadline, so nothing is asked for twice; past it, it counts as absent, and
one more is asked for in its stead, once.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, sqrt

from headway_operator.slo.crowd import queue
from headway_operator.slo.situation import REPLICA_SETTLE_SECONDS, Situation
from headway_operator.slo.sizing import Sizing
from headway_operator.slo.trust import EXPLAINED_SECONDS
from headway_operator.slo.unmodelled import by_symptoms

BURST_DEVIATIONS = 1.3
# Below what there is, the load may be so much higher; and, as it is, is to leave so much of the targets.
DEAD_BAND = 0.08
MOST_USE = 0.95
# So much higher at least, where removals were regretted and one is not to wait all the longer (`removals`).
ROOMY_BAND = 0.2
# Above what there is, the load may be so much more than replicas are trusted with, and no more than one does.
MOST_OVER = 0.05
# A rate ahead that is so many times that of now is a rise.
MOST_RISE = 1.02
LEAST_BURST_SECONDS = 30.0
DRAIN_SECONDS = 45.0
MOST_ADDED = 8
FEW_ADDED = 4
SICK = "SickReplica"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """How many replicas the load calls for, in numbers and words. needed: without the dead band, for which
    none is added. unbounded: before the spec's bounds. roomy: with room for such a rise as was regretted; 0
    where that was not asked. rate, per_second: the rate ahead, with its bursts, and what one replica is
    trusted with, in requests per second; 0 where they are not known."""

    replicas: int
    needed: int
    unbounded: int
    words: str
    rate: float = 0.0
    per_second: float = 0.0
    roomy: int = 0


@dataclass(frozen=True, slots=True)
class Raise:
    """More replicas, or what forbids them."""

    replicas: int
    blocker: str


def recommended(situation: Situation, *, can_move_limits: bool) -> Recommendation:
    """What the load calls for, within the spec's bounds."""
    if situation.sizing is None:
        number = by_symptoms(situation, FEW_ADDED, can_move_limits=can_move_limits)
        return Recommendation(number, number, number, "")
    return _by_capacity(situation, situation.sizing)


def _by_capacity(situation: Situation, found: Sizing) -> Recommendation:
    target, expected = situation.target, situation.forecast
    window = max(LEAST_BURST_SECONDS, situation.lead_seconds)
    window += target.patience_seconds
    burst = BURST_DEVIATIONS * sqrt(expected.idc * expected.ahead / window)
    with_bursts = rate = expected.ahead + burst
    standing, why = 0.0, ""
    # Late are no more than may be, under a long target, unless TTFT is broken.
    if situation.is_behind or (situation.load.late and situation.is_ttft_bad):
        waiting = queue(situation, found)
        drained = waiting.left / _drain_seconds(situation)
        rate = max(rate, expected.now + drained)
        if waiting.is_standing:
            standing, why = situation.supply.ready + drained / found.per_second, ", and a queue that stands"
    elif situation.is_violated:
        rate = max(rate, expected.now)
    roomy, desired = 0, situation.supply.desired
    needed = ceil(rate / found.per_second)
    if needed > desired + 1:
        needed = _shared(situation, found, rate, needed)
    needed = number = max(needed, ceil(standing))
    if number < desired:
        number = _after_dead_band(situation, found, rate, needed, DEAD_BAND * rate)
        if situation.memory.patience > 1.0:
            risen = (1.0 + situation.memory.regretted_rise) * expected.now
            roomy = _after_dead_band(situation, found, rate, number, max(ROOMY_BAND * rate, risen - rate))
    elif not standing and _is_hardly_more(situation, found, rate):
        needed = number = desired
    words = f"{rate:.2f} requests/s expected, {found.per_second:.2f} per replica{why}"
    unbounded = max(1, number)
    number, needed = (target.bound_replicas(max(1, one)) for one in (number, needed))
    return Recommendation(number, needed, unbounded, words, with_bursts, found.per_second, roomy)


def _is_hardly_more(situation: Situation, found: Sizing, rate: float) -> bool:
    """Whether a rate is so little more than replicas are trusted with, with nothing wrong, no rise foretold,
    and no trust just lost, which is to bring replicas. More than they can do it may not be."""
    load, desired, cut_at = situation.forecast, situation.supply.desired, situation.memory.kappa_cut_at
    is_right = not situation.is_behind and not situation.is_violated and load.ahead <= MOST_RISE * load.now
    has_lost = cut_at is not None and situation.now - cut_at < EXPLAINED_SECONDS
    most = min(found.bound * desired, found.per_second * (desired + min(1.0, MOST_OVER * desired)))
    return is_right and not has_lost and rate <= most


def _after_dead_band(situation: Situation, found: Sizing, rate: float, number: int, band: float) -> int:
    """The fewest replicas, from `number` up to those that there are, that could take so much more than this
    rate."""
    target, most = situation.target, rate + max(band, rate * (found.drift or 0.0))

    def takes(fewer: int) -> bool:
        return found.takes(target, fewer, most) and found.takes(target, fewer, rate, MOST_USE)

    # More replicas are never slower.
    wanted = range(max(1, number), situation.supply.desired)
    return wanted.start + bisect_left(wanted, True, key=takes)


def _shared(situation: Situation, found: Sizing, rate: float, number: int) -> int:
    """The fewest replicas, from one more than there are up to `number`, that could take this rate: of more,
    each is given fewer that come at once."""
    wanted, told = range(situation.supply.desired + 1, number), rate / found.capacity.use
    return wanted.start + bisect_left(
        wanted, True, key=lambda more: found.takes(situation.target, more, told)
    )


def bar(situation: Situation) -> str:
    """What forbids more replicas for good, or ""."""
    if situation.target.fixed_replicas is not None:
        return "FixedReplicas"
    if situation.other_scaler:
        return "OtherScaler"
    if situation.infeasible:
        return "TargetInfeasible"
    return "AtMaxReplicas" if situation.supply.desired >= situation.target.max_replicas else ""


def more(situation: Situation, wanted: int) -> Raise:
    """What of a recommendation beyond what there is may be asked for now."""
    supply, now = situation.supply, situation.now
    desired = supply.desired
    barred = bar(situation)
    is_newest_settling = supply.ready > 1 and now - supply.newest_ready_at < REPLICA_SETTLE_SECONDS
    if situation.sizing is None:
        if supply.pending and wanted <= desired and barred not in ("FixedReplicas", "OtherScaler"):
            return Raise(desired, "ReplicaPending")
        # The last replica allowed must have had its time too before anyone says that it did not help.
        if is_newest_settling and barred in ("", "AtMaxReplicas"):
            return Raise(desired, "Settling")
    if barred:
        return Raise(desired, barred)
    if situation.sizing is None and supply.overdue > supply.replaceable:
        # Without a model nobody knows how many would do: none is asked for until there is room for those.
        return Raise(desired, supply.overdue_reason)
    if situation.sick and wanted <= desired and not supply.overdue:
        return Raise(desired, SICK)
    if situation.sizing is not None:
        wanted += supply.replaceable
    return Raise(_raised(situation, wanted), supply.overdue_reason if supply.overdue else "")


def more_to_begin(situation: Situation) -> Raise:
    """Likewise while none is ready yet, of a service that was asleep: what waits at its gateways by now.

    Of others nobody knows whether replicas are slow to come or cannot come at all.
    """
    desired = situation.supply.desired
    if not situation.target.may_sleep or not situation.load.waiting:
        return Raise(desired, "")
    wanted = for_waiting(situation)
    barred = bar(situation) if wanted > desired else ""
    return Raise(desired if barred else _raised(situation, wanted), barred)


def _raised(situation: Situation, wanted: int) -> int:
    """What of it is asked for in one decision."""
    desired = situation.supply.desired
    most = desired + min(MOST_ADDED, max(FEW_ADDED, desired))
    return max(desired, situation.target.bound_replicas(min(wanted, most)))


def for_waiting(situation: Situation) -> int:
    """As many as what waits at the gateways calls for, when there is none yet."""
    places = 2 * max(1, situation.limits.max_num_seqs)
    number = ceil(situation.load.waiting / places)
    if situation.sizing is not None:
        number = max(
            number, ceil(situation.load.waiting / _drain_seconds(situation) / situation.sizing.per_second)
        )
    return situation.target.bound_replicas(max(1, min(MOST_ADDED, number)))


def _drain_seconds(situation: Situation) -> float:
    """In what time a queue is to be gone."""
    return max(DRAIN_SECONDS, situation.target.patience_seconds)

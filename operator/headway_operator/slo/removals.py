"""When replicas go: how many, after how long, and what keeps them.

Down to the highest recommendation of the time looked back (where a replica is known to do more now than it
was thought to do then, so many fewer), but for one in MOMENTS of them, MOST_MOMENTS at most: no replica is
kept for a surge that is over before one could start. Never below what is recommended now (`decide`). One
replica or a tenth at a time, and only while every replica and gateway gives samples. Replicas that found no
place or are past their deadline give none and serve nobody: they hold no removal back, and those beyond the
number that the load calls for go at once. The last one is not removed this way: that none is needed is for
`sleep` to say.

A removal that was regretted makes the time looked back longer (`patience`): what comes and goes is more than
the dead band holds off. Where those that are left could take such a rise as was regretted, and ROOMY_BAND at
least (`replicas`), the time of before is enough: a load that has fallen for good is followed.
"""

from collections.abc import Sequence
from math import ceil

from headway_operator.slo import patience
from headway_operator.slo.memory import Recommended
from headway_operator.slo.replicas import ROOMY_BAND
from headway_operator.slo.situation import Situation

SHARE_REMOVED = 0.1
# Of the recommendations looked back on, one in so many may have been higher, so many at most.
MOMENTS, MOST_MOMENTS = 6, 2
# A whole number, divided and multiplied by the same, may come out above itself by less than this.
ROUNDING = 1e-6


def looked_back_seconds(situation: Situation) -> float:
    """How long fewer replicas must have been enough before one goes."""
    seconds = situation.target.stabilization_seconds
    return patience.looked_back_seconds(situation.memory, seconds, situation.lead_seconds)


def highest(situation: Situation) -> int:
    """What the time looked back called for at most, by what a replica is trusted with by now; but for moments
    before now."""
    recommended = situation.memory.recommended
    numbers = [one.replicas for one in recommended]
    found = _highest(situation, recommended, numbers, looked_back_seconds(situation))
    return situation.target.bound_replicas(found)


def fewer(situation: Situation) -> int:
    """The number after a removal, if one is due; else the number there is. See the header."""
    supply, target = situation.supply, situation.target
    desired, since = supply.desired, situation.memory.watched_since
    if target.fixed_replicas is not None or situation.other_scaler or not situation.is_whole:
        return desired
    watched = 0.0 if since is None else situation.now - since
    if watched >= looked_back_seconds(situation):
        enough = min(highest(situation), _highest_roomy(situation))
    elif watched >= _least_looked_back_seconds(situation):
        enough = _highest_roomy(situation)
    else:
        return desired
    removed = max(1, int(SHARE_REMOVED * desired), desired - supply.ready)
    least = max(1, target.min_replicas, enough + supply.replaceable)
    return min(desired, max(least, desired - removed))


def _highest_roomy(situation: Situation) -> int:
    """The same after a regret, of the time that is looked back without one, with room to spare; what there is
    where that was not asked all the time."""
    memory, seconds = situation.memory, _least_looked_back_seconds(situation)
    regretted_at = memory.patience_at
    if not _is_asked_for_room(situation) or regretted_at is None or situation.now - regretted_at < seconds:
        return situation.supply.desired
    recommended = [one for one in memory.recommended if one.at > situation.now - seconds]
    return _highest(situation, recommended, [max(one.replicas, one.roomy) for one in recommended], seconds)


def _is_asked_for_room(situation: Situation) -> bool:
    """Without a model nobody knows what room there is."""
    return situation.memory.patience > 1.0 and situation.sizing is not None


def _least_looked_back_seconds(situation: Situation) -> float:
    seconds = situation.target.stabilization_seconds
    return patience.least_looked_back_seconds(seconds, situation.lead_seconds)


def _highest(
    situation: Situation, recommended: Sequence[Recommended], numbers: Sequence[int], seconds: float
) -> int:
    """Of numbers that these recommendations over so many seconds tell."""
    if not numbers:
        return situation.supply.desired
    found = situation.sizing
    if found is not None:
        trusted = [min(1.0, one.per_second / found.told_per_second or 1.0) for one in recommended]
        numbers = [ceil(one * share - ROUNDING) for one, share in zip(numbers, trusted, strict=True)]
    # Of a shorter time, as after the first model, there is nothing else to go by.
    is_whole = situation.now - recommended[0].at >= (1.0 - 1.0 / MOMENTS) * seconds
    moments = min(MOST_MOMENTS, len(numbers) // MOMENTS) if is_whole else 0
    return max(sorted(numbers)[-1 - moments], numbers[-1])


def regretted(situation: Situation) -> str:
    """What else would do for a removal than the longer time after a regret, in words; or ""."""
    if not _is_asked_for_room(situation):
        return ""
    room, seconds = max(ROOMY_BAND, situation.memory.regretted_rise), _least_looked_back_seconds(situation)
    return f", or for {seconds:.0f} s with room for {room:.0%} more, since a removal was taken back"


def unseen(situation: Situation) -> str:
    """Whose silence keeps replicas that are not needed, in words; or ""."""
    counted = situation.supply
    if counted.unsampled:
        return f"; none goes while {counted.unsampled} of {counted.ready} give no usable sample"
    return "" if counted.is_gateway_sampled else "; none goes while a gateway gives no usable sample"

"""What a replica is seen to do at most: while requests wait too long at every one, each does what it can.

What a server does beside its steps (HTTP, tokenizing, processors that it shares) is in none of them, so a
model of steps may promise far more than there is; and while requests are late, what is missed says nothing of
the model, so trust is not cut. A queue would then stand for good at replicas that are thought to be enough.
So what came of them in a crowd is counted and taken for the most that one can do, until
- another crowd shows more, or they do more for a minute and nobody is late;
- promises are kept while replicas do nearly as much, which lets it rise as trust does (`trust`);
- requests bring more or less work than those that were counted (`Ceiling.of`): then it says nothing.
"""

from dataclasses import replace
from math import inf

from headway_operator.slo.ceiling import Ceiling
from headway_operator.slo.memory import Memory
from headway_operator.slo.situation import LIMITS_SETTLE_SECONDS, Situation
from headway_operator.slo.sizing import Sizing

# So long requests must have waited too long at every replica; what is longer ago does not count.
CROWDED_SECONDS, LONGEST_SECONDS = 10.0, 300.0
# Of fewer requests there is no telling.
LEAST_SERVED = 30
# What they do for so long without anybody late they can do.
EASY_SECONDS = 60.0
# What happened between two passes further apart nobody saw.
LONGEST_PASS_SECONDS = 60.0


def with_ceiling(situation: Situation) -> Memory:
    """The memory with the ceiling that a crowd shows, where one lasts; a higher one where more was done."""
    memory = replace(situation.memory, crowded_since=_crowded_since(situation))
    found, since = situation.sizing, memory.crowded_since
    if found is None or situation.sick:
        return memory
    work = found.replica.workload
    known = inf if memory.ceiling is None else memory.ceiling.of(work)
    seen = Ceiling(_served_per_second(situation, situation.now - EASY_SECONDS), work.prompt, work.answer)
    if since is None:
        is_easy = not situation.load.late and inf > seen.per_second > known
        return replace(memory, ceiling=seen) if is_easy else memory
    if situation.forecast.now > situation.supply.ready * found.per_second:
        return memory  # replicas are too few by what is known
    most = _most_per_second(situation, found, since)
    if most == inf or (most >= found.per_second and known == inf):
        return memory
    return replace(memory, ceiling=replace(seen, per_second=most))


def _crowded_since(situation: Situation) -> float | None:
    """Since when requests have waited too long at every replica that there is to be; None while not."""
    counted, load, before = situation.supply, situation.load, situation.memory
    is_crowded = load.late > 0 and load.num_queues >= counted.ready > 0
    if not is_crowded or counted.pending or counted.unsampled:
        return None
    is_watched = before.kappa_at is not None and situation.now - before.kappa_at <= LONGEST_PASS_SECONDS
    return before.crowded_since if before.crowded_since is not None and is_watched else situation.now


def _most_per_second(situation: Situation, found: Sizing, since: float) -> float:
    """Of first tokens in the crowd; more by so much as there are fewer places than the best."""
    acted_at = (situation.memory.limits_changed_at or 0.0) + LIMITS_SETTLE_SECONDS
    since = max(since, acted_at, situation.now - LONGEST_SECONDS)
    if situation.now - since < CROWDED_SECONDS:
        return inf
    lack = max(1.0, found.capacity.limits.max_num_seqs / max(1, situation.limits.max_num_seqs))
    return lack * _served_per_second(situation, since)


def _served_per_second(situation: Situation, since: float) -> float:
    """First tokens of one replica; inf where there are too few to tell."""
    seconds = situation.recent.totals(since).get("replica_seconds", 0.0)
    served = sum(situation.recent.counts("ttft", since).values())
    return served / seconds if seconds > 0.0 and served >= LEAST_SERVED else inf

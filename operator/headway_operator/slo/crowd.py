"""What a replica is seen to do at most: while requests wait too long at every one, each does what it can.

What a server does beside its steps (HTTP, tokenizing, processors that it shares) is in none of them, so a
model of steps may promise far more than there is; and while requests are late, what is missed says nothing of
the model, so trust is not cut. A queue would then stand for good at replicas that are thought to be enough.
So first tokens in such a crowd are counted and taken for the most that a replica can do: no less than
LEAST_KAPPA of what the model tells then, and no more than it tells at any time. A later crowd corrects it, up
or down; it rises where more was done for a minute and nobody was late, and by a hundredth a minute while
promises are kept (`trust`); it says nothing of requests or places of another kind (`Ceiling.of`), and is
forgotten with the targets or the revision that it was seen under.

A queue may stand for good elsewhere too: at some replicas while others keep up, or where those places that
keep TPOT with all of them taken (`knobs`) do less than all places could. So while TTFT is broken, what is
left of a queue when more replicas could be ready is told by how fast it goes, once it has lasted. Where it
stands although replicas were thought to be enough, those that there are do what comes and no more, so others
are needed to drain it, and nothing but too much trust explains what is missed (`trust`).
"""

from dataclasses import dataclass, replace
from math import inf

from headway_operator.slo.ceiling import Ceiling, is_alike
from headway_operator.slo.memory import LEAST_KAPPA, Memory
from headway_operator.slo.pace import AS_TOLD
from headway_operator.slo.situation import LIMITS_SETTLE_SECONDS, Situation
from headway_operator.slo.sizing import Sizing
from headway_operator.state import Observed

# So long requests must have waited too long at every replica; what is longer ago does not count.
CROWDED_SECONDS, LONGEST_SECONDS = 10.0, 300.0
# A queue has lasted after so long; how fast it goes is told by so long. When others can be ready is so far
# ahead at least. It stands if, by then, no more than this share of it would be gone.
STANDING_SECONDS, LONGEST_SERVED_SECONDS, LEAST_AHEAD_SECONDS = 20.0, 60.0, 30.0
MOST_GONE = 0.5
# With fewer of the places that keep TPOT, it is the limit that makes the queue.
LEAST_PLACES = 0.8
# Of fewer requests there is no telling.
LEAST_SERVED = 30
# What they do for so long without anybody late they can do.
EASY_SECONDS = 60.0
# What happened between two passes further apart nobody saw.
LONGEST_PASS_SECONDS = 60.0


def with_ceiling(situation: Situation) -> Memory:
    """The memory with what a crowd shows, where one lasts, or what replicas do without one."""
    memory, now = situation.memory, situation.now
    found, since, late_since = situation.sizing, _crowded_since(situation), _late_since(situation)
    if (since, late_since) != (memory.crowded_since, memory.late_since):
        memory = memory._replace(crowded_since=since, late_since=late_since)
    if found is None:
        return memory
    if since is None:
        is_easy = memory.late_at is None or now - memory.late_at >= EASY_SECONDS
        seen = _seen(situation, found, now - EASY_SECONDS) if is_easy and found.ceiling < inf else None
        return memory if seen is None or seen.per_second <= found.ceiling else memory._replace(ceiling=seen)
    acted_at = (memory.limits_changed_at or 0.0) + LIMITS_SETTLE_SECONDS
    since = max(since, acted_at, now - LONGEST_SECONDS)
    # Where more come than replicas are thought to do, they are too few by what is known.
    if (
        now - since < CROWDED_SECONDS
        or situation.forecast.now > situation.supply.ready * found.told_per_second
    ):
        return memory
    seen = _seen(situation, found, since)
    if seen is None or (seen.per_second >= found.told_per_second and found.ceiling == inf):
        return memory
    if situation.is_full:
        # Fewer places than the best, as a crowd has them, do less.
        lack = max(1.0, seen.max_num_seqs / max(1, situation.limits.max_num_seqs))
        seen = replace(seen, per_second=lack * seen.per_second)
    least = LEAST_KAPPA * found.capacity.per_second
    return memory._replace(ceiling=replace(seen, per_second=max(least, seen.per_second)))


def with_revision(memory: Memory, observed: Observed) -> Memory:
    """The memory without what was seen of replicas of an earlier revision than the newest."""
    newest = max(observed.revisions, key=lambda one: one.created_at, default=None)
    if newest is None or newest.hash == memory.revision:
        return memory
    if not memory.revision:
        return memory._replace(revision=newest.hash)
    # Another model may count the same prompts otherwise, and tell the time between tokens right.
    return memory._replace(revision=newest.hash, ceiling=None, usual=None, pace=AS_TOLD)


@dataclass(frozen=True, slots=True)
class Queue:
    """left: of the requests that wait, those that would still be there when replicas asked for now are ready.
    is_standing: although there are enough replicas by what they are thought to do."""

    left: float
    is_standing: bool = False


def queue(situation: Situation, found: Sizing) -> Queue:
    """What is to be expected of the requests that wait."""
    ready, coming, waiting = situation.supply.ready, situation.forecast.now, float(situation.load.waiting)
    if not ready:
        return Queue(waiting)
    ahead_seconds = max(LEAST_AHEAD_SECONDS, situation.lead_seconds)
    spare = ready * found.per_second - coming
    served = _served_beside_queue(situation, found)
    if served is not None and spare > 0.0:
        left = max(0.0, waiting - max(0.0, served - coming) * ahead_seconds)
        if left >= (1.0 - MOST_GONE) * waiting > 0.0:
            return Queue(left, is_standing=True)
    return Queue(max(0.0, waiting - max(0.0, spare) * ahead_seconds))


def _served_beside_queue(situation: Situation, found: Sizing) -> float | None:
    """First tokens per second of all replicas while some requests waited too long; None where that has not
    lasted, breaks no promise, or says nothing of what replicas can do: of too few, where some are sick or
    give no sample, or with limits that have just changed or leave places unused."""
    since, now = situation.memory.late_since, situation.now
    if since is None or now - since < STANDING_SECONDS or not situation.is_ttft_bad:
        return None
    if situation.supply.unsampled or situation.sick or situation.is_settling:
        return None
    if situation.limits.max_num_seqs < LEAST_PLACES * found.capacity.full_num_seqs:
        return None
    since = max(since, now - LONGEST_SERVED_SECONDS)
    seconds = situation.recent.seconds(since)
    served = sum(situation.recent.counts("ttft", since).values())
    return served / seconds if seconds and served >= LEAST_SERVED else None


def _late_since(situation: Situation) -> float | None:
    """Since when some have waited too long, with all replicas ready that are to be; None while not."""
    counted, before, now = situation.supply, situation.memory, situation.now
    if not situation.load.late or counted.pending or not counted.ready:
        return None
    is_watched = before.kappa_at is not None and now - before.kappa_at <= LONGEST_PASS_SECONDS
    since = before.late_since if before.late_since is not None and is_watched else now
    return max(since, counted.newest_ready_at)


def _crowded_since(situation: Situation) -> float | None:
    """Since when requests have waited too long at every replica that there is to be; None while not."""
    counted, before = situation.supply, situation.memory
    is_crowded = situation.load.num_late_queues >= counted.ready > 0
    if not is_crowded or counted.pending:
        return None
    is_watched = before.kappa_at is not None and situation.now - before.kappa_at <= LONGEST_PASS_SECONDS
    return before.crowded_since if before.crowded_since is not None and is_watched else situation.now


def _seen(situation: Situation, found: Sizing, since: float) -> Ceiling | None:
    """First tokens per second of one replica; None where there are too few to tell, or of requests that are
    not like those that replicas are sized for."""
    totals, work = situation.recent.totals(since), found.replica.workload
    seconds, prompts = totals.get("replica_seconds", 0.0), totals.get("prompts", 0.0)
    served = sum(situation.recent.counts("ttft", since).values())
    if not seconds or not prompts or served < LEAST_SERVED:
        return None
    prompt = totals.get("prompt_sum", 0.0) / prompts
    if not is_alike(prompt, work.prompt):
        return None
    return Ceiling(served / seconds, prompt, work.answer, found.capacity.limits.max_num_seqs)

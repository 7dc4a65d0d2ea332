"""How long fewer replicas must have been enough before one goes: longer after a removal that was regretted.

A load that comes and goes, or a capacity that was thought higher than it is, would have the same replica
removed and started again every few minutes. So a removal that is taken back within REGRET times as long as
was looked back before it makes that time GROWTH times as long, MOST_SECONDS at most; an hour without one
halves it again. Those that leave room for such a rise as was regretted need not wait for that (`removals`):
it is measured from the removal on, in replicas that the load is worth. In a steady load the first removal
alone is paid for; a load that rises once a day regrets nothing. Nor does a rate for which those before the
removal would have been too few as well, by what one is trusted with now or was then, whichever is more. And
since a load that rises needs a few more before it needs many, a regret is taken back where the rate comes to
that within the time that was looked back before it.
"""

from dataclasses import dataclass

from headway_operator.slo.memory import Memory, Regret

# Removal looks back so many start-up times, and no less than `scaling.stabilizationSeconds`.
LEADS_LOOKED_BACK = 2.0
REGRET = 4.0
GROWTH = 3.0
MOST_SECONDS = 1800.0
CALM_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Load:
    """In requests per second. rate: the one ahead, with its bursts and without what waits, since a queue is
    what a wrong removal leaves. per_second: what one replica is trusted with. level: the rate of now."""

    rate: float
    per_second: float
    level: float

    @property
    def in_replicas(self) -> float:
        """That its level is worth; 0 where what one does is not known."""
        return self.level / self.per_second if self.per_second > 0.0 else 0.0


def looked_back_seconds(memory: Memory, stabilization_seconds: float, lead_seconds: float) -> float:
    """How long fewer replicas must have been enough before one goes."""
    least = least_looked_back_seconds(stabilization_seconds, lead_seconds)
    return max(least, min(MOST_SECONDS, memory.patience * least))


def least_looked_back_seconds(stabilization_seconds: float, lead_seconds: float) -> float:
    """The same where no removal was regretted, or where fewer would leave room to spare."""
    return max(stabilization_seconds, LEADS_LOOKED_BACK * lead_seconds)


def with_removal(memory: Memory, before: int, load: Load, looked_back: float, now: float) -> Memory:
    """The memory after one of so many replicas was removed because fewer are enough. Of removals that go one
    after another those before the first count, and the load at the last."""
    is_next = _is_recent(memory, looked_back, now) and before < (memory.removed_from or 0)
    memory = memory._replace(removed_at=now, removed_load=load.in_replicas)
    if is_next and memory.regret is None:
        return memory
    return memory._replace(removed_from=before, removed_per_second=load.per_second, regret=None)


def with_raise(memory: Memory, load: Load, looked_back: float, now: float) -> Memory:
    """The memory after the load called for more replicas: whether that takes the last removal back."""
    if memory.regret is not None:
        return memory
    if _is_beyond_those_removed(memory, load) or not _is_recent(memory, looked_back, now):
        return memory._replace(removed_at=None, removed_from=None)
    longest = max(1.0, memory.patience, MOST_SECONDS / looked_back * memory.patience)
    longer = min(longest, GROWTH * memory.patience)
    known = memory.regretted_rise if memory.patience > 1.0 else 0.0
    return memory._replace(
        patience=longer,
        patience_at=now,
        regretted_rise=max(known, _rise(memory, load)),
        regret=Regret(memory.patience, memory.patience_at, memory.regretted_rise),
    )


def with_risen(memory: Memory, load: Load, looked_back: float, now: float) -> Memory:
    """The memory after any pass: a regret is taken back where the rate has come to more than those before the
    removal could take."""
    regret = memory.regret
    if regret is None or memory.patience_at is None:
        return memory
    ended = memory._replace(removed_at=None, removed_from=None, regret=None)
    if now - memory.patience_at > looked_back * regret.patience / memory.patience:
        return ended
    if not _is_beyond_those_removed(memory, load):
        # It may go on to rise.
        rise = _rise(memory, load)
        return memory if rise <= memory.regretted_rise else memory._replace(regretted_rise=rise)
    return ended._replace(
        patience=regret.patience,
        patience_at=regret.patience_at,
        regretted_rise=regret.regretted_rise,
    )


def with_calm(memory: Memory, now: float) -> Memory:
    """The memory after a pass in which nothing was taken back."""
    if memory.patience <= 1.0 or memory.patience_at is None or now - memory.patience_at < CALM_SECONDS:
        return memory
    return memory._replace(patience=max(1.0, memory.patience / 2.0), patience_at=now)


def _is_recent(memory: Memory, looked_back: float, now: float) -> bool:
    """Whether the last removal can still be regretted."""
    return memory.removed_at is not None and now - memory.removed_at <= REGRET * looked_back


def _is_beyond_those_removed(memory: Memory, load: Load) -> bool:
    """Whether a rate is more than those before the removal could take, by what one is trusted with or was
    then, whichever is more. A checkpoint of an earlier version does not say how many they were."""
    most = max(load.per_second, memory.removed_per_second)
    return memory.removed_from is not None and load.rate > memory.removed_from * most


def _rise(memory: Memory, load: Load) -> float:
    """Of the load since the last removal, as a share of it; 0 where that is not known."""
    return max(0.0, load.in_replicas / memory.removed_load - 1.0) if memory.removed_load > 0.0 else 0.0

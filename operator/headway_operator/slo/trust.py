"""kappa: how far the model of a replica is trusted, by what came of trusting it.

What neither model nor factors know shows as a promise broken although there are as many replicas as were
thought enough, none of them on its way and the load no more than they were thought to carry; nor is anybody
late, unless the queue stands although they were thought enough to get rid of it (`crowd`). Those who became
late while replicas were too few are answered for minutes after, as they yield: what was missed until the last
of them was answered tells nothing either. Each such
verdict, on evidence since the last one, takes up to a tenth off: the share of it by which more was missed
over WHOLE_SECONDS than may be. Misses are seen before the factors that tell of them are measured: as far as
the model itself tells less of a replica within EXPLAINED_SECONDS, the cut is taken back, so that nothing is
held against it twice. Promises kept give a hundredth a minute back, where enough requests came to
tell: time alone gives nothing, a quiet night says nothing of what a replica can do. For the same reason more
trust than the model's own word, above 1, is won only while replicas do TRIED of what they are thought to do,
and goes by a hundredth a minute while they do not: it was won under another load. All of it goes at once
where replicas are thought enough, and yet more requests are late than may be of all that came within the TTFT
target, or ten seconds if that is longer: the misses of a crowd come all together.
While they do, and nobody is late, all trust comes back up to MOST_TIMES as fast, the less was missed over
that time, from half of what may be missed down to nothing: an objective that is kept with much to spare is
paid for with replicas.
The most that one was seen to do in a crowd (`crowd`) is cut with it, where it is what counts, and comes back
by a hundredth a minute.
There is no integral term: a queue that has grown is the backlog's business.
"""

from collections.abc import Iterator
from dataclasses import replace

from headway_operator.slo.crowd import queue
from headway_operator.slo.memory import LEAST_KAPPA, MOST_KAPPA, Cut, Memory
from headway_operator.slo.situation import Situation
from headway_operator.slo.sizing import Sizing
from headway_operator.slo.verdict import verdict

KAPPA_CUT = 0.9
KAPPA_GAIN_PER_SECOND = 0.01 / 60.0
MOST_TIMES = 5.0
WHOLE_SECONDS = 300.0
# Of what replicas are thought to do they must do this share for a kept promise to say that they can do more.
TRIED = 0.75
# Within this time after a cut the model may come to explain it.
EXPLAINED_SECONDS = 60.0
# No more than this is given for the time between two passes.
MOST_GAIN_SECONDS = 60.0


def with_trust(situation: Situation) -> Memory:
    """The memory with kappa brought up to date."""
    memory, now = situation.memory, situation.now
    seconds = 0.0 if memory.kappa_at is None else min(max(0.0, now - memory.kappa_at), MOST_GAIN_SECONDS)
    memory = memory._replace(kappa_at=now)
    found = situation.sizing
    if found is None or situation.infeasible or situation.sick:
        return _with_excused(memory, situation, is_short=False)
    memory = _explained(memory, found, now)
    counted = situation.supply
    is_enough = situation.forecast.now <= counted.ready * found.per_second
    is_late = situation.load.late > 0
    is_lost = memory.kappa > 1.0 and is_enough and situation.is_crowded
    if is_lost:
        memory = memory._replace(kappa=1.0, cut=None)
    memory = _with_excused(memory, situation, is_short=not is_enough or counted.pending > 0)
    is_explained = not is_enough or (is_late and not queue(situation, found).is_standing)
    excess = _excess(situation, memory.excused_at)
    if excess > 0.0 and not counted.pending and not is_explained and not situation.is_settling:
        cut = KAPPA_CUT**excess
        memory = _with_ceiling_times(cut, memory, found)
        after = max(LEAST_KAPPA, memory.kappa * cut)
        taken = Cut(memory.kappa, after, found.capacity.per_second)
        return memory._replace(kappa=after, kappa_cut_at=now, cut=taken)
    if is_lost or not _is_kept(situation):
        return memory
    gain = KAPPA_GAIN_PER_SECOND * seconds
    # What was lost comes back anyway: fewer requests to each replica are what its loss has brought.
    is_tried = situation.forecast.now >= TRIED * counted.ready * found.told_per_second
    if memory.kappa > 1.0 and not is_tried:
        memory = memory._replace(kappa=max(1.0, memory.kappa * (1.0 - gain)))
    elif is_tried or memory.kappa < 1.0:
        times = 1.0 + (MOST_TIMES - 1.0) * _spare(situation) if is_tried else 1.0
        memory = memory._replace(kappa=min(MOST_KAPPA, memory.kappa * (1.0 + times * gain)))
    return _with_ceiling_times(1.0 + gain, memory, found)


def _explained(memory: Memory, found: Sizing, now: float) -> Memory:
    """The memory with as much of the last cut taken back as the model tells less of a replica by now."""
    cut, cut_at = memory.cut, memory.kappa_cut_at
    if cut is None:
        return memory
    if cut_at is None or now - cut_at > EXPLAINED_SECONDS:
        return memory._replace(cut=None)
    told = found.capacity.per_second
    if not 0.0 < told < cut.per_second:
        return memory
    return memory._replace(kappa=max(memory.kappa, min(cut.before, cut.after * cut.per_second / told)))


def _with_ceiling_times(factor: float, memory: Memory, found: Sizing) -> Memory:
    """Where the ceiling is less than what the model tells, and no lower than the least trust in that."""
    seen = memory.ceiling
    if seen is None or found.ceiling >= found.told_per_second:
        return memory
    least = min(seen.per_second, LEAST_KAPPA * found.capacity.per_second)
    return memory._replace(ceiling=replace(seen, per_second=max(least, factor * seen.per_second)))


def _with_excused(memory: Memory, situation: Situation, *, is_short: bool) -> Memory:
    """The memory after a pass in which somebody is late for want of replicas, now or since it was so. Who was
    late in the last pass has been answered since."""
    before, late_at = situation.memory.kappa_at, situation.memory.late_at
    was_late = late_at is not None and before is not None and late_at >= before
    is_going_on = was_late and memory.excused_at == before
    if is_going_on or (is_short and situation.load.late):
        return memory._replace(excused_at=situation.now)
    return memory


def _excess(situation: Situation, excused_at: float | None) -> float:
    """How far misses of a target that is missed now lie beyond those allowed, as a share of these, 1 at most.
    Until `excused_at` those of TTFT tell nothing.

    Over the last minutes: a verdict on half a minute, sought every few seconds, comes by chance now and then.
    """
    if situation.ttft.target_milliseconds is None and situation.is_ttft_bad:
        return 1.0
    is_bad = {
        "ttft": situation.is_ttft_bad and _is_ttft_bad_since(situation, excused_at),
        "tpot": situation.is_tpot_bad,
    }
    beyond = [used - 1.0 for name, used in _used(situation, excused_at or 0.0) if is_bad[name]]
    return max(0.0, min(1.0, max(beyond, default=0.0)))


def _is_ttft_bad_since(situation: Situation, excused_at: float | None) -> bool:
    """Whether what came after that alone is missed too often."""
    if excused_at is None or excused_at <= situation.now - WHOLE_SECONDS:
        return True
    totals = situation.recent.totals(excused_at)
    missed = totals.get("ttft_missed", 0.0) + totals.get("refused", 0.0) + situation.load.late
    judged = int(totals.get("ttft_met", 0.0)), int(missed)
    return verdict(*judged, situation.target.percentile) == "violated"


def _spare(situation: Situation) -> float:
    """1 where nothing was missed over the last minutes; 0 where half of what may be missed of a target was
    (both targets share that), and while somebody is late."""
    if situation.load.late:
        return 0.0
    judged = {"ttft": situation.ttft, "tpot": situation.tpot}
    used = [share for name, share in _used(situation) if judged[name].target_milliseconds is not None]
    return max(0.0, 1.0 - 2.0 * max(used, default=0.5))


def _used(situation: Situation, ttft_since: float = 0.0) -> Iterator[tuple[str, float]]:
    """Misses over those that are allowed, over the last minutes, of each target that was judged; of TTFT from
    `ttft_since` on."""
    since = situation.now - WHOLE_SECONDS
    share = 1.0 - situation.target.percentile / 100.0
    for name, start in (("ttft", max(since, ttft_since)), ("tpot", since)):
        totals = situation.recent.totals(start)
        missed = totals.get(f"{name}_missed", 0.0) + (totals.get("refused", 0.0) if name == "ttft" else 0.0)
        allowed = share * (missed + totals.get(f"{name}_met", 0.0))
        if allowed > 0.0:
            yield name, missed / allowed


def _is_kept(situation: Situation) -> bool:
    """No more than the allowed share missed any target, of so many requests that more could have shown."""
    percentile = situation.target.percentile
    judged = [one for one in (situation.ttft, situation.tpot) if one.target_milliseconds is not None]
    return bool(judged) and all(
        verdict(one.met + one.missed, 0, percentile) == "met"
        and 100 * one.missed <= (100 - percentile) * (one.met + one.missed)
        for one in judged
    )

"""The batch limits: which one to move for a symptom, and how far.

| symptom                                                          | limit                              |
| ---                                                              | ---                                |
| TTFT bad, queue dominates, running at the cap, TPOT has slack,   | raise max_num_seqs                 |
|   KV memory is free                                              |                                    |
| TTFT bad, prefill dominates or the token budget holds back,      | raise max_num_batched_tokens       |
|   TPOT has slack                                                 |                                    |
| TPOT bad, steps follow prompt tokens                             | lower max_num_batched_tokens       |
| TPOT bad, steps follow sequences or what they attend to          | lower max_num_seqs                 |
| both bad                                                         | the model's best, with replicas    |
| more load than can be served: places taken, who waits is late    | what serves most with them taken   |
| KV memory nearly used, or preempting                             | none is raised                     |

With a model of steps the limits are its best feasible ones (`capacity`), gone to at once and looked at again
every TUNING_SECONDS: small differences are left alone, but where all places are taken and there should be
more. The table then only trims them, by RAISE and LOWERING within LEAST_TRIM and MOST_TRIM, and not while
replicas are too few, which no limit mends. So a missed TPOT can never starve prompts of tokens.
Under more load than can be served no more sequences may run than serve most within TPOT with all places taken
(`saturation`): those who are late yield, so most who are let in are served as promised. Nor are steps kept
short then at the cost of prompts.
Without a model the table moves them by symptoms alone.
"""

from dataclasses import dataclass, replace
from math import ceil, floor, inf, sqrt

from headway_operator.samples import Limits
from headway_operator.slo import saturation
from headway_operator.slo.late_queue import late_of_queue
from headway_operator.slo.situation import Situation
from headway_operator.slo.sizing import Sizing

LEAST_SLACK = 0.15
MOST_KV_USE = 0.85
# A step costs far more for its weights than for one more sequence, so TPOT grows much slower than the batch:
# with half of the target unused a raise may quadruple, with a third double, else it is a careful half more.
UNMEASURED_RAISE = 2.0
RAISES = ((0.5, 4.0), (0.3, 2.0), (LEAST_SLACK, 1.5))
UNMODELLED_LOWERING = 0.7
# Without a model nobody knows what a small budget costs: no further down than this share of the highest.
LEAST_BUDGET_SHARE = 0.25

TUNING_SECONDS = 15.0
# A difference that is worth a change while nothing is wrong; and how many times the places where all are
# taken.
WORTHWHILE, LEAST_RAISE = 0.2, 1.05
RAISE, LOWERING = 1.05, 0.8
LEAST_TRIM, MOST_TRIM = 0.8, 1.2
# Replicas lack a little where TPOT with all inside is predicted at no more than so many times its target, and
# is missed by no more than so many times those who would be late in a queue; and the places for all, beyond
# the mean number, in standard deviations.
MOST_MISSED, MOST_MISSING, ROOM_DEVIATIONS = 1.25, 2.0, 2.0
# Replicas take nobody for late before so much of the TTFT target.
LEAST_PATIENCE = 0.25
# Places are taken all the time where so many of them are, so many wait for each that runs, and some are late.
NEARLY_ALL, SATURATED = 0.8, 0.25

Trims = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Move:
    """New limits, with cause, words, and the trims over the model's best that they stand for."""

    limits: Limits
    cause: str
    words: str
    trims: Trims = (1.0, 1.0)


def move(situation: Situation) -> Move | None:
    """The move that the symptoms call for, and the model; None when there is none to make."""
    if situation.sick:
        return None
    if situation.sizing is not None:
        return _towards_best(situation, situation.sizing)
    if not situation.is_violated or situation.is_settling:
        return None
    if situation.is_tpot_bad:
        found = None if situation.is_ttft_bad else _lower(situation)
    else:
        found = _raise(situation)
    return None if found is None or found.limits == situation.limits else found


def _towards_best(situation: Situation, found: Sizing) -> Move | None:
    """The model's best limits, trimmed."""
    changed_at, limits = situation.memory.limits_changed_at, situation.limits
    is_due = changed_at is None or situation.now - changed_at >= TUNING_SECONDS
    if not is_due:
        return None
    if situation.infeasible:
        # No limits keep the promise; a queue is no reason to leave room unused.
        return _raise(situation) if situation.load.waiting and situation.is_full else None
    trims = situation.memory.trims
    places, why = _places(situation, found)
    new = _trimmed_best(situation, found, places, trims)
    is_beyond = _is_lowered(found, places) and new.max_num_seqs < limits.max_num_seqs
    is_raised = new.max_num_seqs >= LEAST_RAISE * limits.max_num_seqs
    is_short = situation.is_full and is_raised and not situation.is_tpot_bad
    is_trimmed = not is_beyond and not is_short and not _differs(new, limits)
    if is_trimmed:
        trims, why = _trimmed(situation, found, places), "trimmed for what is measured"
        new = _trimmed_best(situation, found, places, trims)
    if new == limits or (is_trimmed and trims == situation.memory.trims):
        return None
    changes = [
        f"{name} {getattr(limits, name)} -> {getattr(new, name)}"
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if getattr(limits, name) != getattr(new, name)
    ]
    return Move(new, _cause(limits, new), f"{', '.join(changes)}; {why}", trims)


def _places(situation: Situation, found: Sizing) -> tuple[int, str]:
    """The limit on sequences before it is trimmed, and why so many."""
    best, full = found.capacity.limits.max_num_seqs, found.capacity.full_num_seqs
    room = _room_for_all(situation, found)
    if room > best:
        return room, "replicas lack a little, so there is room for all"
    if not room and full < best and _is_saturated(situation, full):
        tpot = situation.target.targets.tpot_milliseconds
        served = saturation.places(found.replica, found.capacity, found.factors, tpot)
        if served < best:
            return served, "as many as serve most within TPOT and memory with all places taken"
    return best, "the step model's best"


def _trimmed_best(situation: Situation, found: Sizing, places: int, trims: Trims) -> Limits:
    seqs = round(places * (min(1.0, trims[0]) if _is_lowered(found, places) else trims[0]))
    if situation.load.kv_use >= MOST_KV_USE or situation.load.has_preempted:
        seqs = min(seqs, situation.limits.max_num_seqs)
    tokens = round(_tokens(situation, found, max(1, seqs)) * trims[1])
    return situation.target.bound_limits(Limits(max(1, seqs), tokens))


def _tokens(situation: Situation, found: Sizing, seqs: int) -> int:
    """The token budget before it is trimmed.

    Steps that are kept short take a prompt longer to compute, which TTFT has time for while replicas are
    enough. Where they lack, who is let in has waited already: then prompts are computed at once, if TPOT is
    kept by the places alone.
    """
    if situation.is_ttft_bad and not situation.is_tpot_bad and _lacks_replicas(situation, found):
        tpot = situation.target.targets.tpot_milliseconds
        if tpot is None or found.replica.full_tpot(seqs, found.factors) <= tpot:
            return situation.target.highest.max_num_batched_tokens
    return found.capacity.limits.max_num_batched_tokens


def _lacks_replicas(situation: Situation, found: Sizing) -> bool:
    """Whether more comes than replicas are trusted with, or places are taken all the time."""
    is_short = situation.forecast.now > situation.supply.ready * found.per_second
    return is_short or _is_saturated(situation, found.capacity.full_num_seqs)


def _is_lowered(found: Sizing, places: int) -> bool:
    """Whether there are fewer than the model's best, which nothing may then go beyond."""
    return places < found.capacity.limits.max_num_seqs


def _is_saturated(situation: Situation, places: int) -> bool:
    """Whether so many places would be taken again as soon as one leaves them, and who waits is late."""
    load = situation.load
    is_busy = load.busiest_running >= NEARLY_ALL * places
    return load.late > 0 and is_busy and load.waiting >= SATURATED * load.running


def _room_for_all(situation: Situation, found: Sizing) -> int:
    """Places for all that come where replicas lack but a little, else 0.

    A limit that keeps TPOT for those inside makes a queue of the others. With far too few replicas that is
    best for whom it can be; where TPOT is nearly kept with all inside, it would break the promise for many to
    keep it for few.
    """
    wanted, ready = situation.target.targets.tpot_milliseconds, situation.supply.ready
    if wanted is None or not ready or situation.forecast.now <= ready * found.per_second:
        return 0
    limits = replace(found.capacity.limits, max_num_seqs=situation.target.highest.max_num_seqs)
    rate, replica, factors = situation.forecast.now / ready, found.replica, found.factors
    seen = replica.latencies(rate, limits, factors)
    if seen.tpot > MOST_MISSED * wanted:
        return 0
    most = MOST_MISSING * late_of_queue(rate, found.per_second, _patience_seconds(situation, seen.ttft))
    if replica.missing_tpot(rate, limits, factors, wanted) > most:
        return 0
    inside = seen.running
    if situation.load.late:
        # Those who wait would come in at once.
        inside += situation.load.waiting / ready
        taken = ceil(inside)
        if replica.full_tpot(taken, factors) > MOST_MISSED * wanted:
            return 0
        if replica.full_missing_tpot(taken, factors, wanted) > most:
            return 0
    return ceil(inside + ROOM_DEVIATIONS * sqrt(seen.running)) + 1


def _patience_seconds(situation: Situation, ttft_milliseconds: float) -> float:
    """How long one may wait for a place and be in time, where its prompt takes so long. As replicas see it:
    nobody is late before a share of the target."""
    target = situation.target.targets.ttft_milliseconds
    return inf if target is None else max(LEAST_PATIENCE * target, target - ttft_milliseconds) / 1000.0


def _differs(new: Limits, old: Limits) -> bool:
    pairs = (
        (new.max_num_seqs, old.max_num_seqs),
        (new.max_num_batched_tokens, old.max_num_batched_tokens),
    )
    return any(abs(after - before) > WORTHWHILE * before for after, before in pairs)


def _cause(old: Limits, new: Limits) -> str:
    if new.max_num_seqs != old.max_num_seqs:
        return "RaisedBatchLimit" if new.max_num_seqs > old.max_num_seqs else "LoweredBatchLimit"
    is_raised = new.max_num_batched_tokens > old.max_num_batched_tokens
    return "RaisedTokenBudget" if is_raised else "LoweredTokenBudget"


def _trimmed(situation: Situation, found: Sizing, places: int) -> Trims:
    """By the table; back towards the model's best while nothing is wrong or replicas are what lacks. No
    places are taken that those who come need: that would make a queue of them."""
    seqs, tokens = situation.memory.trims
    is_short = situation.forecast.now > situation.supply.ready * found.per_second
    if is_short or not situation.is_violated or (situation.is_ttft_bad and situation.is_tpot_bad):
        return _nearer(seqs), _nearer(tokens)
    slack = situation.tpot_slack
    if situation.is_tpot_bad:
        if _follows_prompts(situation, found):
            return seqs, max(LEAST_TRIM, tokens * LOWERING)
        running = situation.load.running / max(1, situation.load.num_sampled)
        needed = (running + sqrt(running)) / max(1, places)
        return max(LEAST_TRIM, min(seqs, max(min(1.0, needed), seqs * LOWERING))), tokens
    if slack is not None and slack < LEAST_SLACK:
        return seqs, tokens
    if situation.is_queue_dominated and situation.is_full:
        return min(MOST_TRIM, seqs * RAISE), tokens
    return seqs, min(MOST_TRIM, tokens * RAISE)


def _nearer(trim: float) -> float:
    return min(1.0, trim * RAISE) if trim < 1.0 else max(1.0, trim / RAISE)


def _follows_prompts(situation: Situation, found: Sizing) -> bool:
    """Whether prompts or sequences take most of the time beyond the base of steps."""
    model, work = found.replica.model, found.replica.workload
    token = model.sequence + model.kv * work.context
    return model.prefill * work.prompt > token * work.answer


def _raise(situation: Situation) -> Move | None:
    load, limits = situation.load, situation.limits
    slack = situation.tpot_slack
    is_tight = slack is not None and slack < LEAST_SLACK
    if is_tight or load.kv_use >= MOST_KV_USE or load.has_preempted:
        return None
    words = _slack_words(situation)
    if situation.is_queue_dominated and situation.is_full:
        seqs = _raised_seqs(situation)
        if seqs <= limits.max_num_seqs:
            return None
        new = situation.target.bound_limits(Limits(seqs, limits.max_num_batched_tokens))
        return Move(
            new, "RaisedBatchLimit", f"max_num_seqs {limits.max_num_seqs} -> {new.max_num_seqs}{words}"
        )
    tokens = limits.max_num_batched_tokens
    new = situation.target.bound_limits(Limits(limits.max_num_seqs, 2 * tokens))
    change = f"max_num_batched_tokens {tokens} -> {new.max_num_batched_tokens}{words}"
    return Move(new, "RaisedTokenBudget", change)


def _raised_seqs(situation: Situation) -> int:
    load, seqs, slack = situation.load, situation.limits.max_num_seqs, situation.tpot_slack
    factor = UNMEASURED_RAISE
    if slack is not None:
        factor = next(factor for least, factor in RAISES if slack >= least)
    demand = ceil((load.running + load.waiting) / max(1, load.num_sampled))
    raised = min(max(2 * seqs, demand), max(seqs + 1, floor(seqs * factor)))
    return min(raised, situation.target.highest.max_num_seqs)


def _lower(situation: Situation) -> Move | None:
    load, limits, target = situation.load, situation.limits, situation.target
    tokens = limits.max_num_batched_tokens
    least = max(floor(LEAST_BUDGET_SHARE * target.highest.max_num_batched_tokens), limits.max_num_seqs)
    if load.prefill_share > 0.5 and tokens > max(target.lowest.max_num_batched_tokens, least):
        new = target.bound_limits(
            Limits(limits.max_num_seqs, max(least, floor(tokens * UNMODELLED_LOWERING)))
        )
        words = f"max_num_batched_tokens {tokens} -> {new.max_num_batched_tokens}; most tokens are prompts"
        return Move(new, "LoweredTokenBudget", words)
    used = min(limits.max_num_seqs, load.busiest_running)
    if used <= max(1, target.lowest.max_num_seqs):
        return None
    new = target.bound_limits(Limits(max(1, floor(used * UNMODELLED_LOWERING)), tokens))
    words = f"max_num_seqs {limits.max_num_seqs} -> {new.max_num_seqs} with up to {used} running"
    return Move(new, "LoweredBatchLimit", words)


def _slack_words(situation: Situation) -> str:
    if situation.tpot.target_milliseconds is None:
        return "; no TPOT target holds it back"
    if situation.tpot_slack is None:
        return "; no TPOT measured yet"
    return f"; TPOT has {situation.tpot_slack:.0%} slack"

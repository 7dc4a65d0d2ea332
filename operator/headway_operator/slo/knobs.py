"""The batch limits: which one to move when a promise is broken, and how far.

| symptom                                                          | limit                        |
| ---                                                              | ---                          |
| TTFT bad, queue dominates, running at the cap, TPOT has slack,   | raise max_num_seqs           |
|   KV memory is free                                              |                              |
| TTFT bad, prefill dominates or the token budget holds back,      | raise max_num_batched_tokens |
|   TPOT has slack                                                 |                              |
| TPOT bad, most computed tokens are prompts                       | lower max_num_batched_tokens |
| TPOT bad otherwise                                               | lower max_num_seqs           |
| both bad, replicas can be added or are on their way              | as for TPOT                  |
| both bad, no replica can be added                                | none                         |
"""

from dataclasses import dataclass
from math import ceil, floor

from headway_operator.slo.situation import Situation
from headway_operator.state import Limits

LEAST_SLACK = 0.15
MOST_KV_USE = 0.85
# A step costs far more for its weights than for one more sequence, so TPOT grows much slower than the batch:
# with half of the target unused a raise may quadruple, with a third double, else it is a careful half more. A
# raise that proves too much is taken back by `_lower` and remembered as a ceiling.
UNMEASURED_RAISE = 2.0
RAISES = ((0.5, 4.0), (0.3, 2.0), (LEAST_SLACK, 1.5))
LOWERING = 0.7


@dataclass(frozen=True, slots=True)
class Move:
    """New limits, with cause and words. `ceiling`: the max_num_seqs that proved too high, if one did."""

    limits: Limits
    cause: str
    words: str
    ceiling: int | None = None


def move(situation: Situation, *, can_add_replicas: bool) -> Move | None:
    """The move that the symptoms call for; None when there is none to make."""
    if situation.is_tpot_bad:
        # Fewer at once keep TPOT at the cost of TTFT, which is no help unless replicas take over the rest.
        found = None if situation.is_ttft_bad and not can_add_replicas else _lower(situation)
    else:
        found = _raise(situation)
    return None if found is None or found.limits == situation.limits else found


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
    load, seqs = situation.load, situation.limits.max_num_seqs
    memory, slack = situation.memory, situation.tpot_slack
    factor = UNMEASURED_RAISE
    if slack is not None:
        factor = next(factor for least, factor in RAISES if slack >= least)
    demand = ceil((load.running + load.waiting) / max(1, load.num_sampled))
    raised = min(max(2 * seqs, demand), max(seqs + 1, floor(seqs * factor)))
    if memory.ceiling_seqs is not None and situation.now < memory.ceiling_until:
        raised = min(raised, memory.ceiling_seqs - 1)
    return min(raised, situation.target.highest.max_num_seqs)


def _lower(situation: Situation) -> Move | None:
    load, limits, target = situation.load, situation.limits, situation.target
    tokens = limits.max_num_batched_tokens
    if load.prefill_share > 0.5 and tokens > max(target.lowest.max_num_batched_tokens, limits.max_num_seqs):
        new = target.bound_limits(Limits(limits.max_num_seqs, floor(tokens * LOWERING)))
        words = f"max_num_batched_tokens {tokens} -> {new.max_num_batched_tokens}; most tokens are prompts"
        return Move(new, "LoweredTokenBudget", words)
    used = min(limits.max_num_seqs, load.busiest_running)
    if used <= max(1, target.lowest.max_num_seqs):
        return None
    new = target.bound_limits(Limits(max(1, floor(used * LOWERING)), tokens))
    words = f"max_num_seqs {limits.max_num_seqs} -> {new.max_num_seqs} with up to {used} running"
    return Move(new, "LoweredBatchLimit", words, ceiling=used)


def _slack_words(situation: Situation) -> str:
    if situation.tpot.target_milliseconds is None:
        return "; no TPOT target holds it back"
    if situation.tpot_slack is None:
        return "; no TPOT measured yet"
    return f"; TPOT has {situation.tpot_slack:.0%} slack"

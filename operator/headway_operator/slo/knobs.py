"""The batch limits: which one to move when a promise is broken, and how far.

| symptom                                                          | limit                        |
| ---                                                              | ---                          |
| TTFT bad, queue dominates, running at the cap, TPOT has slack,   | raise max_num_seqs           |
|   KV memory is free                                              |                              |
| TTFT bad, prefill dominates or the token budget holds back,      | raise max_num_batched_tokens |
|   TPOT has slack                                                 |                              |
| TPOT bad, most computed tokens are prompts                       | lower max_num_batched_tokens |
| TPOT bad otherwise                                               | lower max_num_seqs           |
| both bad                                                         | neither: replicas            |
"""

from dataclasses import dataclass
from math import ceil, floor

from headway_operator.slo.situation import Situation
from headway_operator.state import Limits

LEAST_SLACK = 0.15
MOST_KV_USE = 0.85
# A raise is at most fourfold, and what TPOT allows if it grew in proportion.
MOST_RAISE = 4.0
TPOT_MARGIN = 0.85
LOWERING = 0.7


@dataclass(frozen=True, slots=True)
class Move:
    """New limits, with cause and words. `ceiling`: the max_num_seqs that proved too high, if one did."""

    limits: Limits
    cause: str
    words: str
    ceiling: int | None = None


def move(situation: Situation) -> Move | None:
    """The move that the symptoms call for; None when there is none to make."""
    if situation.is_ttft_bad and situation.is_tpot_bad:
        return None
    found = _raise(situation) if situation.is_ttft_bad else _lower(situation)
    return None if found is None or found.limits == situation.limits else found


def _raise(situation: Situation) -> Move | None:
    load, limits = situation.load, situation.limits
    if situation.tpot_slack < LEAST_SLACK or load.kv_use >= MOST_KV_USE or load.has_preempted:
        return None
    slack = _slack_words(situation)
    if situation.is_queue_dominated and situation.is_full:
        seqs = _raised_seqs(situation)
        if seqs <= limits.max_num_seqs:
            return None
        new = situation.target.bound_limits(Limits(seqs, limits.max_num_batched_tokens))
        return Move(
            new, "RaisedBatchLimit", f"max_num_seqs {limits.max_num_seqs} -> {new.max_num_seqs}{slack}"
        )
    tokens = limits.max_num_batched_tokens
    new = situation.target.bound_limits(Limits(limits.max_num_seqs, 2 * tokens))
    words = f"max_num_batched_tokens {tokens} -> {new.max_num_batched_tokens}{slack}"
    return Move(new, "RaisedTokenBudget", words)


def _raised_seqs(situation: Situation) -> int:
    load, seqs = situation.load, situation.limits.max_num_seqs
    memory, target, measured = (
        situation.memory,
        situation.tpot.target_milliseconds,
        situation.tpot.p_milliseconds,
    )
    factor = MOST_RAISE
    if target is not None and measured:
        factor = min(factor, TPOT_MARGIN * target / measured)
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
    if situation.tpot.p_milliseconds is None:
        return "; no TPOT measured yet"
    return f"; TPOT has {situation.tpot_slack:.0%} slack"

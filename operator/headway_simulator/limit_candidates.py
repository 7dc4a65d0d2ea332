"""Token budgets of a step that the oracle tries: the most and some halvings, then those of even steps.

A step of even length takes no longer than TPOT may, beside so many sequences: its budget, in which a prompt's
tokens count by what they cost, leaves to prompts what sequences leave of the target. The spec's bounds are
the caller's to keep.
"""

from math import floor

from headway_operator.slo import Target
from headway_simulator.step_model import StepModel
from headway_simulator.work import guessed_batch

NUM_HALVINGS = 4
# Of the TPOT target that an even step takes, and of the sequences beside it that TPOT seems to allow.
EVEN_STEPS_USE = 0.95
EVEN_STEPS_CROWDS = (1.0, 0.5)


def token_candidates(model: StepModel, target: Target) -> list[int]:
    """In the order that they are tried in."""
    most = target.highest.max_num_batched_tokens
    found = [most >> halvings for halvings in range(NUM_HALVINGS)]
    wanted = target.targets.tpot_milliseconds
    if wanted is None or not model.prefill_token_milliseconds:
        return found
    for share in EVEN_STEPS_CROWDS:
        seqs = max(1, round(share * guessed_batch(model, target)))
        left = EVEN_STEPS_USE * wanted - 1000 * model.seconds(0, 0, seqs, 0)
        tokens = seqs + floor(left / model.prefill_token_milliseconds)
        if seqs < tokens < most and tokens not in found:
            found.append(tokens)
    return found
